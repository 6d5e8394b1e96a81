"""Pages, groups and where a step's tokens lie: integers only."""
