"""`python -m mxfp4`: the command line."""

from mxfp4.cli.main import main

if __name__ == "__main__":
    main()
