"""The `flwr-distill` command."""

import os

from flwr_distill.node.proxies import exempt_loopback


def main() -> None:
    """Run the command; loopback needs no proxy, here and in all that is started."""
    os.environ.update(exempt_loopback(os.environ))
    from flwr_distill.cli.main import app  # here: gRPC reads the environment when it is imported

    app()


if __name__ == "__main__":
    main()
