"""``python -m ronde`` is the command ``ronde``."""

from ronde.cli import main

if __name__ == "__main__":
    main()
