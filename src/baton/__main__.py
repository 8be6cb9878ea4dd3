"""`python -m baton`: the command `baton`, where its script is not on the PATH."""

from baton.cli.main import app

if __name__ == "__main__":
    app(prog_name="baton")
