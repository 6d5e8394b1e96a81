"""EPS core: configuration, page pool, the float64 oracle, the decode loop, telemetry and the command line.

Imports neither mlx nor torch; `eps_core.load.load_backend` loads a backend by name.
"""
