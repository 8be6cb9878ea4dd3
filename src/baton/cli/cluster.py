"""`baton cluster`: what a cluster of several hosts needs."""

from __future__ import annotations

import os
import secrets
import stat
import sys

import typer

app = typer.Typer(help="What a cluster of several hosts needs.", no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """What a cluster of several hosts needs."""


@app.command("secret")
def secret() -> None:
    """Print a new secret for a cluster: `baton cluster secret > FILE`.

    Give the file to each gateway and each instance, `baton serve --cluster-secret FILE`, and to nobody else:
    who has it takes part. The file that the output goes to is made readable for you alone.
    """
    from baton.protocol.rules.cluster_secret import SECRET_BYTES, ClusterSecret

    descriptor = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        try:
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            typer.echo(f"error: cannot make the file readable for you alone: {error.strerror}", err=True)
            raise typer.Exit(1) from None
    sys.stdout.write(ClusterSecret.make(secrets.token_bytes(SECRET_BYTES)).file())
