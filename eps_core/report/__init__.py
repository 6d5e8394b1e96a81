"""Pages and figures from result files."""
