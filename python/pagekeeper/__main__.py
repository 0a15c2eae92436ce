"""`python -m pagekeeper` is the command `pagekeeper`."""

from pagekeeper.cli import main

if __name__ == "__main__":
    main()
