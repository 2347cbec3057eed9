"""The dashboard's web application."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import parse_qs, urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flwr_distill.fleet.dashboard.access import Access, Role
from flwr_distill.fleet.dashboard.actions import MAX_SETTINGS, Actions
from flwr_distill.fleet.dashboard.files import open_file, read_run
from flwr_distill.fleet.dashboard.pages import FOLDER, parts, render, run_parts, whole_page
from flwr_distill.fleet.dashboard.responses import REPORT_POLICY, BoundingHeaders, TextPage
from flwr_distill.fleet.dashboard.run_log import RunLogs
from flwr_distill.fleet.dashboard.runs import Run
from flwr_distill.fleet.dashboard.watch import Place, Snapshot, Watch
from flwr_distill.fleet.outbox_page import outbox_page, read_log
from flwr_distill.fleet.run_settings import preset_names
from flwr_distill.node.outbox import FOLDER as OUTBOX
from flwr_distill.server.page.comparison_page import comparison_page
from flwr_distill.server.page.run_files import REPORT
from flwr_distill.task.errors import ReportedError

EVERY = (1.0, 2.0)
"""Seconds between two reads of the federation."""
KEEP_ALIVE = 15.0
"""Seconds after which a stream without news says that it is there."""
FIRST_READ = 20.0
"""Seconds that the first page waits for the first read."""
READS = 3
"""Reads in which an unknown run may appear."""
MAX_STREAMS = 100
MAX_OF_ONE = 40
"""Streams in all, and of one certificate."""
PART = 2**18
"""Bytes of a report that are read at a time."""
ACTING = 60.0
"""Seconds for which an action waits for the one before."""
MAX_COMPARED = 10
MAX_FORM = 4 * MAX_SETTINGS
LOG = logging.getLogger("flwr_distill.dashboard")

Page = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """The dashboard of a place: `app` serves it.

    Parameters
    ----------
    place : Place
        What it shows.
    access : Access
        Who may see what.
    hosts : list[str]
        Names by which browsers may call it: another one is refused, as a foreign page may have
        its own name resolve to this machine.
    allow_actions : bool (default: False)
        Whether runs may be submitted, stopped, resumed and exported.
    """

    def __init__(
        self, place: Place, access: Access, hosts: list[str], *, allow_actions: bool = False
    ) -> None:
        self._watch = Watch(place)
        self._place = place
        self._access = access
        self._exports = TemporaryDirectory(prefix="dashboard-")
        self._actions = Actions(place, Path(self._exports.name))
        self._said: OrderedDict[str, str] = OrderedDict()
        self._logs = RunLogs(place.control)
        self._log_threads = CapacityLimiter(4)  # a slow SuperLink holds no other page up
        self._allow_actions = allow_actions
        self._token = secrets.token_urlsafe(32)
        self._snapshot = Snapshot(0.0)
        self._parts: Mapping[str, str] = {}
        self._news = asyncio.Event()
        self._streams: Counter[str] = Counter()
        self._acting = asyncio.Lock()
        routes = [
            Route("/", self._for(Role.VIEWER, self._overview)),
            Route("/events", self._for(Role.VIEWER, self._overview_events)),
            Route("/runs/compare", self._for(Role.VIEWER, self._compare)),
            Route("/runs/{run}", self._for(Role.VIEWER, self._run_page)),
            Route("/runs/{run}/events", self._for(Role.VIEWER, self._run_events)),
            Route("/runs/{run}/report.html", self._for(Role.VIEWER, self._report)),
            Route("/runs/{run}/export/{file}", self._for(Role.SUBMITTER, self._exported)),
            Route("/outboxes/{node}", self._for(Role.OPERATOR, self._outbox)),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ]
        if allow_actions:
            act = [Route("/submit", self._for(Role.SUBMITTER, self._submit_form))]
            act.append(Route("/submit", self._for(Role.SUBMITTER, self._submit), methods=["POST"]))
            act.append(
                Route(
                    "/runs/{run}/{action}", self._for(Role.SUBMITTER, self._act), methods=["POST"]
                )
            )
            routes = [*act, *routes]
        self.app = Starlette(
            routes=routes,
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
                Middleware(BoundingHeaders),
            ],
            exception_handlers={HTTPException: self._failed, ReportedError: self._refused},
            lifespan=self._watching,
        )

    @asynccontextmanager
    async def _watching(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._keep_watching())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._exports.cleanup()

    async def _keep_watching(self) -> None:
        while True:
            try:
                snapshot = await to_thread.run_sync(self._watch.read)
                self._parts = await to_thread.run_sync(parts, snapshot)
                self._snapshot = snapshot
            except Exception:  # the next read may succeed; until then the page says that it is old
                LOG.exception("The federation could not be read")
                self._parts = {**self._parts, "alarms": render("unread")}
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(random.uniform(*EVERY))

    def _for(self, least: Role, page: Page) -> Page:
        """A page for those who have at least a role."""

        async def guarded(request: Request) -> Response:
            if self._role(request) < least:
                raise HTTPException(403, f"this is for the role {least.name.lower()}")
            return await page(request)

        return guarded

    def _role(self, request: Request) -> Role:
        return self._access.role(request.scope["state"].get("certificate"))

    def _submits(self, request: Request) -> bool:
        return self._allow_actions and self._role(request) >= Role.SUBMITTER

    async def _overview(self, request: Request) -> Response:
        if not self._parts:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), FIRST_READ)
        if not self._parts:
            raise HTTPException(503, "the federation has not been read yet: reload the page")
        return self._page(request, "Federation", "overview", self._parts, "/events")

    async def _overview_events(self, request: Request) -> Response:
        async def current() -> Mapping[str, str]:
            return self._parts

        return self._stream(request, current)

    async def _run_page(self, request: Request) -> Response:
        run = await self._run(request)
        contents = await self._parts_of(request, run.run_id)
        events = f"/runs/{run.run_id}/events"
        return self._page(
            request,
            f"Run {run.run_id[:6]}",
            "run_page",
            contents,
            events,
            run=run,
            exported=[file.name for file in self._actions.exported(run)],
        )

    async def _run_events(self, request: Request) -> Response:
        run_id = (await self._run(request)).run_id

        async def current() -> Mapping[str, str]:
            return await self._parts_of(request, run_id)

        return self._stream(request, current)

    async def _parts_of(self, request: Request, run_id: str) -> Mapping[str, str]:
        run = self._snapshot.run(run_id)
        if run is None:
            return {}
        log: tuple[Sequence[tuple[str, str]], str] = ([], self._snapshot.away)
        if not self._snapshot.away:
            log = await to_thread.run_sync(self._logs.lines, run.run_id, limiter=self._log_threads)
        contents = await to_thread.run_sync(run_parts, run, log, self._token)
        if not self._submits(request):
            del contents["actions"]
        return contents

    async def _run(self, request: Request) -> Run:
        for _ in range(READS):
            if run := self._snapshot.run(request.path_params["run"]):
                return run
            with suppress(TimeoutError):  # it may have started just now
                await asyncio.wait_for(self._news.wait(), FIRST_READ)
        raise HTTPException(404, "no such run here: `flwr-distill runs list` has older ones")

    def _folder(self, run: Run) -> Path:
        if run.folder is None:
            raise HTTPException(404, "this run has not met its nodes: it has no results")
        return run.folder

    async def _report(self, request: Request) -> Response:
        folder = self._folder(await self._run(request))
        try:
            file = await to_thread.run_sync(open_file, folder / REPORT)
        except OSError:
            raise HTTPException(404, "no report yet: a run writes it when it ends") from None
        headers = {"Content-Security-Policy": REPORT_POLICY}
        parts = iter(partial(file.read, PART), b"")  # the file is closed with the response
        return StreamingResponse(parts, media_type="text/html", headers=headers)

    async def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        if not 2 <= len(names) <= MAX_COMPARED:
            raise HTTPException(400, f"choose 2 to {MAX_COMPARED} runs")
        runs = [run for name in names if (run := self._snapshot.run(name)) and run.folder]
        if len(runs) < len(names):
            raise HTTPException(404, "one of the runs is not here, or has no results")
        folders = [self._folder(run) for run in runs]
        page = await to_thread.run_sync(_comparison, folders, self._place.runs_dir)
        return HTMLResponse(page, headers={"Content-Security-Policy": REPORT_POLICY})

    async def _exported(self, request: Request) -> Response:
        run, name = await self._run(request), request.path_params["file"]
        files = {file.name: file for file in self._actions.exported(run)}
        if name not in files:
            raise HTTPException(404, "no such file: export the run first")
        return FileResponse(files[name], filename=name, media_type="application/octet-stream")

    async def _outbox(self, request: Request) -> Response:
        name = request.path_params["node"]
        folder = next((node.folder for node in self._snapshot.local if node.name == name), None)
        if folder is None:
            raise HTTPException(404, "no such node on this machine")

        def page() -> str:
            lines, broken = read_log(folder / OUTBOX)
            return outbox_page(lines, folder / OUTBOX, broken, back="/#nodes")

        try:
            content = await to_thread.run_sync(page)
        except OSError as error:
            raise HTTPException(409, f"{name}'s outbox cannot be read: {error}") from None
        return HTMLResponse(content, headers={"Content-Security-Policy": REPORT_POLICY})

    async def _submit_form(
        self, request: Request, chosen: str = "", settings: str = "", error: str = ""
    ) -> Response:
        return self._page(
            request,
            "Submit a run",
            "submit",
            {},
            presets=preset_names(),
            chosen=chosen,
            settings=settings,
            message=error,
            status=400 if error else 200,
        )

    async def _submit(self, request: Request) -> Response:
        form = await self._form(request)
        chosen, settings = form.get("preset", ""), form.get("settings", "")
        try:
            text = await self._acted(self._actions.submit, chosen, settings)
        except ReportedError as error:
            return await self._submit_form(request, chosen, settings, str(error))
        return self._redirect("/", text)

    async def _act(self, request: Request) -> Response:
        await self._form(request)
        run, action = await self._run(request), request.path_params["action"]
        actions: dict[str, Callable[[Run], str]] = {
            "stop": self._actions.stop,
            "resume": self._actions.resume,
            "export": self._actions.export,
        }
        if action not in actions:
            raise HTTPException(404, "no such action")
        return self._redirect(f"/runs/{run.run_id}", await self._acted(actions[action], run))

    async def _acted(self, action: Callable[..., str], *arguments: object) -> str:
        """What an action says; one acts at a time."""
        try:
            await asyncio.wait_for(self._acting.acquire(), ACTING)
        except TimeoutError:
            raise HTTPException(503, "another action takes its time: retry later") from None
        try:
            text = await to_thread.run_sync(action, *arguments)
        finally:
            self._acting.release()
        LOG.info("%s", text)
        return text

    def _redirect(self, path: str, text: str) -> Response:
        """Lead to a page that shows a text, once."""
        name = secrets.token_urlsafe(8)
        self._said[name] = text
        while len(self._said) > MAX_STREAMS:
            self._said.popitem(last=False)
        return RedirectResponse(f"{path}?done={name}", 303)

    async def _form(self, request: Request) -> dict[str, str]:
        """Fields of a form of ours; a form on another site cannot know its token."""
        origin = request.headers.get("origin")
        if origin and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "the form is of another site")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM:
                raise HTTPException(413, "the form is too large")
        fields = {
            key: values[0] for key, values in parse_qs(body.decode("utf-8", "replace")).items()
        }
        if not secrets.compare_digest(fields.get("token", "").encode(), self._token.encode()):
            raise HTTPException(403, "the form is too old: reload the page")
        return fields

    def _stream(
        self, request: Request, current: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Response:
        """Server-sent events with the parts that have changed, after each read."""
        caller = _caller(request)
        if self._streams.total() >= MAX_STREAMS or self._streams[caller] >= MAX_OF_ONE:
            raise HTTPException(503, f"{self._streams[caller]} pages are open already")

        async def events() -> AsyncIterator[str]:
            self._streams[caller] += 1
            shown: dict[str, str] = {}
            try:
                # A role may be withdrawn, and a certificate expire, while the page is open.
                while not await request.is_disconnected() and self._role(request) > Role.NOBODY:
                    news = self._news
                    changed = {k: v for k, v in (await current()).items() if shown.get(k) != v}
                    shown |= changed
                    yield f"data: {json.dumps(changed)}\n\n" if changed else ": still here\n\n"
                    with suppress(TimeoutError):
                        await asyncio.wait_for(news.wait(), KEEP_ALIVE)
            finally:
                self._streams[caller] -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    def _page(
        self,
        request: Request,
        title: str,
        name: str,
        contents: Mapping[str, str],
        events: str = "",
        *,
        status: int = 200,
        **more: object,
    ) -> Response:
        content = {
            "events": events,
            "run": None,
            "submits": self._submits(request),
            "token": self._token,
            "bad": status != 200,
            "message": self._said.pop(request.query_params.get("done", ""), ""),
            **more,
        }
        return TextPage(whole_page(title, name, contents, **content), status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._message(error.detail, error.status_code)

    async def _refused(self, request: Request, error: Exception) -> Response:
        return self._message(str(error), 409)

    def _message(self, text: str, status: int) -> Response:
        content = {"events": "", "run": None, "submits": False, "bad": True, "message": text}
        return TextPage(whole_page("That did not work", "message", {}, **content), status)


def _caller(request: Request) -> str:
    """By which the streams of a user are counted."""
    certificate = request.scope["state"].get("certificate")
    return str(certificate["serialNumber"] if certificate else "")


def _comparison(folders: list[Path], runs_dir: Path) -> str:
    try:
        return comparison_page([read_run(folder) for folder in folders], runs_dir, back="/#runs")
    except Exception as error:  # whatever the files contain
        LOG.exception("Runs could not be compared")
        raise HTTPException(409, "their files cannot be compared: one is malformed") from error
