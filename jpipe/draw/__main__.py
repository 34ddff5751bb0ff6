"""`python -m jpipe.draw`."""

from jpipe.draw._command import main

if __name__ == "__main__":
    main()
