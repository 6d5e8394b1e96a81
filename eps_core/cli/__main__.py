"""`python -m eps_core.cli` is `eps-proto`."""

from eps_core.cli.main import main

main()
