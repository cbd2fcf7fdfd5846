"""``python -m lrpx``: the command line, where its script is on no path."""

from lrpx.cli import main

if __name__ == "__main__":
    main()
