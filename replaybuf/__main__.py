"""`python -m replaybuf`."""

from replaybuf.cli import main

if __name__ == "__main__":
    main()
