"""Draws docs/dashboard.md's pictures of a real federation (python -m tests.dashboard.pictures)."""

import tempfile
import time
from pathlib import Path

from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.node.processes import start_bound, stop
from tests.browsers import chromium, set_width
from tests.environments import PROGRAM

from .served import served
from .test_live import waited

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = ("-c", 'strategy="hfldd" num-rounds=40 hfldd.distill-steps=2000')


def main():
    """Draw all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalFederation(5, folder / "state", cwd=folder) as federation:
            here = ("--state-dir", str(federation.state_dir))
            (port,) = free_ports(1)
            with (
                served("--port", port, *here, cwd=folder) as address,
                chromium(folder / "chromium") as browser,
            ):
                log = folder / "queue.log"
                queue = start_bound(
                    [*PROGRAM, "queue", "serve", *here], log=log, env=federation.env
                )
                time.sleep(5)
                for more in ((), ("--priority", "3"), ("--after", "1")):
                    words = [*PROGRAM, "run", "--queue", *here, *RUN, *more]
                    start_bound(words, log=log, env=federation.env).wait(60)
                browser.get(address)
                waited(browser, "live", "Awaited", r"Round\s+[1-9]", seconds=300)
                draw(browser, "live", "live")
                draw(browser, "queue", "queue")
                federation.nodes[3].kill()
                waited(browser, "alarms", "node-3 is not running")
                draw(browser, "fault", "alarms")
                stop([queue])


def draw(browser, name, part):
    """Draw the page from a part on, wide and narrow."""
    for width, ending in ((1100, ""), (390, "-narrow")):
        set_width(browser, width)
        browser.execute_script(f"document.querySelector('[data-part={part}]').scrollIntoView()")
        time.sleep(0.5)
        browser.save_screenshot(str(DOCS / f"dashboard-{name}{ending}.png"))
    set_width(browser, 1100)


if __name__ == "__main__":
    main()
