"""`python -m eps_core.cli` is `eps-proto`."""

import sys


def main() -> None:
    try:
        from eps_core.cli.main import main as run  # within: it takes a second, in which somebody may press Ctrl-C
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
