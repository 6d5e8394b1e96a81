"""EPS inside engines that run on Torch. Nothing imports these by chance: each needs its engine."""
