"""`python -m eagle3x`."""

from eagle3x.cli import main

if __name__ == "__main__":
    main()
