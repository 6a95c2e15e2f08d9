"""``python -m belady`` is the command ``belady``."""

from belady.cli import main

if __name__ == "__main__":
    main()
