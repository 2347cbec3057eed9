"""Faults in the midst of a run, one function each: it breaks something, and repairs it.

A cause starts a run by the command that users type, and yields once the fault is there. After that
it repairs what it broke.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.node.processes import kill_group
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    DISTILL_SECTOR,
    HAND_IN,
    HAND_OUT,
    TRAIN_SECTOR,
)
from flwr_distill.strategies.hfldd.method import DISTILL, LABEL_KNOWLEDGE, RECEIVE, TRAIN_POOL
from tests.faults.causes import fill, small_disk
from tests.faults.plays import DEADLINE, NODES

SMALL_HFLDD = {
    "partition__classes": 5,
    "hfldd__groups": 2,
    "hfldd__distill_steps": 5,
    "hfldd__auxiliary_size": 50,
}
SMALL_FEDHEAD = {
    "fedhead__sectors": 1,
    "fedhead__distill_epochs": 2,
    "fedhead__least_classes": 0.0,
    "fedhead__least_gain": 0.0,
}
BEFORE = "NODE_DIES_BEFORE_WORK"


def server_import_fails(play):
    play.start(app=play.app(server="faulty.needs_a_package"))
    play.broke()
    yield


def node_import_fails(play):
    server = "flwr_distill.server.app"
    play.start(app=play.app(server=server, client="faulty.needs_a_package"))
    play.broke()
    yield


def serverapp_killed(play):
    play.start()
    os.kill(play.after_round(1), signal.SIGKILL)
    play.broke()
    yield


def serverapp_memory(play):
    play.start(app=play.app(server="faulty.server_out_of_memory"))
    play.broke()
    yield


def serverapp_hangs(play):
    """Until it is stopped, once that is named."""
    play.start(app=play.app(server="faulty.server_hangs"))
    play.found("hangs")
    play.broke()
    play.heal = play.federation.stop_runs
    yield


def serverapp_hangs_in_the_queue(play):
    """The queue's timeout ends it."""
    control = play.federation.control_address
    state_dir = play.folder / "queue"
    state_dir.mkdir()
    serve = ["queue", "serve", "--insecure", "--superlink", control]
    with play.serving(*serve, "--state-dir", str(state_dir)):
        app = play.app(server="faulty.server_hangs")
        play.start(app=app, queued=state_dir, command_options=("--timeout", "25"))
        play.broke()
        yield


def node_killed(strategy, phase, number=0, fault="NODE_DIES_DURING_WORK", **settings):
    """A cause: a node is killed in a phase, and its restart policy starts it again."""

    def cause(play):
        play.start(strategy=strategy, min_nodes=2, num_rounds=2, **settings)
        play.arm(fault, phase, number)
        play.release()
        play.taken(phase, number)
        restart_victim(play)
        yield
        play.federation.make_whole([play.ghost])

    return cause


def restart_victim(play):
    """Kill it whole and start it again: its app may not have come to all of its processes yet."""
    play.federation.signal(play.victim, signal.SIGKILL)  # the SuperNode first: it takes no leave
    node = play.federation.nodes[play.victim]
    node.kill()
    node.start()


def member_killed_handing_in(play):
    """A leader dies as it averages; a member dies as it sends its model to the next leader."""
    play.start(strategy="fedhead", min_nodes=2, num_rounds=2, **SMALL_FEDHEAD)
    play.arm(BEFORE, AGGREGATE_SECTOR, 1)
    play.arm(BEFORE, HAND_IN)
    play.release()
    play.taken(AGGREGATE_SECTOR, 1)
    ghosts = [play.ghost]
    restart_victim(play)
    play.taken(HAND_IN)
    restart_victim(play)
    yield
    play.federation.make_whole([*ghosts, play.ghost])


def leader_killed_handing_out(play):
    """Over direct links, in which leaders hand the model to their members."""
    for index, port in enumerate(free_ports(NODES)):
        play.federation.set_node(index, peer_address=f"127.0.0.1:{port}")
    yield from node_killed("fedhead", HAND_OUT, fault=BEFORE, links="direct", **SMALL_FEDHEAD)(play)
    for index in range(NODES):
        play.federation.set_node(index)


def worker_takes(fault):
    """A cause: a node's app takes a fault as it trains."""

    def cause(play):
        play.start()
        play.arm(fault, "train", 2)
        play.release()
        play.taken("train", 2)
        yield

    return cause


def policy(**rules):
    """A cause: the policy of a node refuses the run."""

    def cause(play):
        play.federation.set_node(0, policy=rules)
        play.start(min_nodes=2)
        play.release()
        play.broke()
        yield
        play.federation.set_node(0)

    return cause


def nobody_answers(play):
    play.start()
    play.after_round(1)
    for index in range(NODES):
        play.federation.signal(index, signal.SIGSTOP)
    play.release()
    play.broke()
    yield
    for index in range(NODES):
        play.federation.signal(index, signal.SIGCONT)


def results_disk_full(play):
    with small_disk(play.runs_dir, "2m"):
        play.start()
        play.after_round(1)
        fill(play.runs_dir)
        play.release()
        play.broke()
        yield


def same_name(play):
    for index in (0, 1):
        play.federation.set_node(index, name="ward-3")
    play.start()
    play.release()
    play.broke()
    yield
    for index in (0, 1):
        play.federation.set_node(index)


def data_gone(play):
    for index, file in enumerate(own_data(play.folder)):
        own = {"data": str(file), "partition_id": None, "num_partitions": None}
        play.federation.set_node(index, name=f"node-{index}", **own)
    shape = {"private__shape": "1x8x8", "private__num_classes": 10}
    play.start(dataset="private", fraction_evaluate=1.0, min_nodes=2, **shape)
    play.arm("DATA_GONE", "train", 2)
    play.taken("train", 2)
    yield
    for index in range(NODES):
        play.federation.set_node(index)


def own_data(folder):
    """A file of digits for each node, in a folder of its own."""
    digits = load_digits()
    images = (digits.images / 16 * 255).astype(np.uint8)
    folders = [folder / f"data-{index}" for index in range(NODES)]
    for index, own in enumerate(folders):
        own.mkdir()
        part = slice(index * 500, (index + 1) * 500)
        np.savez(own / "digits.npz", images=images[part], labels=digits.target[part])
    return [own / "digits.npz" for own in folders]


def superlink_killed(play):
    """It is back after 5 s, with its database."""
    play.start()
    play.after_round(1)
    play.broke()
    kill_group(play.federation._superlink)
    play.release()

    def heal():
        time.sleep(5)
        play.federation._start_superlink()

    play.heal = heal
    yield


def superlink_gone(play):
    play.start()
    play.after_round(1)
    play.broke()
    kill_group(play.federation._superlink)
    play.release()
    yield
    play.federation._start_superlink()
    play.federation.stop_runs()


def half_a_message(play):
    """Of a reply with a model of 1.3 MB, 300 KB arrive."""
    play.start(model="convnet3")
    play.after_round(1)
    play.federation.wires[0].break_after(300_000)
    play.release()
    play.broke()
    yield


def network_cut(seconds):
    """A cause: a node's packets vanish for so long."""

    def cause(play):
        play.patience += seconds
        play.start(min_nodes=2, num_rounds=max(3, int(1.2 * seconds / DEADLINE)))
        play.after_round(1)
        wire = play.federation.wires[0]
        wire.cut()
        timer = threading.Timer(seconds, wire.heal)
        timer.start()
        play.release()
        play.broke()
        yield
        timer.join()
        wire.heal()

    return cause


def another_version(play):
    """What Python says of our package on a node is that of an older one."""
    info = play.folder / "older" / "flwr_distill-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr-distill\nVersion: 0.0.1\n")
    play.federation.paths[0] = info.parent
    play.federation.set_node(0)
    play.start()
    play.release()
    play.broke()
    yield
    del play.federation.paths[0]
    play.federation.set_node(0)


@dataclass(frozen=True)
class RunFault:
    """A cause, and what one line on each side must name: what is broken, and what repairs it."""

    cause: Callable
    server: tuple[str, ...]
    site: tuple[str, ...] = ()
    """Empty where no node is concerned, or none can speak."""
    code: int | None = 0
    """Exit code of the command; None where it depends on what the others had done by then."""
    state: str = ""
    """By `flwr-distill runs`, if it is not what the exit code says."""
    within: float = 30.0
    journal: bool = True
    """Whether the journal has the server's line: not of a ServerApp that is gone, or hangs."""
    report: bool = True
    """Whether there is a report: not where it cannot be written."""


PHASES = {
    "nodes train": ("train", node_killed("fedavg", "train", 1)),
    "nodes evaluate": (
        "evaluate",
        node_killed("fedavg", "evaluate", 1, BEFORE, fraction_evaluate=1.0),
    ),
    "nodes send soft labels": (
        LABEL_KNOWLEDGE,
        node_killed("hfldd", LABEL_KNOWLEDGE, **SMALL_HFLDD),
    ),
    "members distil": (DISTILL, node_killed("hfldd", DISTILL, **SMALL_HFLDD)),
    "a head gets virtual data": (
        RECEIVE,
        node_killed("hfldd", RECEIVE, 1, BEFORE, **SMALL_HFLDD),
    ),
    "heads train": (TRAIN_POOL, node_killed("hfldd", TRAIN_POOL, 1, **SMALL_HFLDD)),
    "a leader hands out the model": (HAND_OUT, leader_killed_handing_out),
    "a sector trains": (TRAIN_SECTOR, node_killed("fedhead", TRAIN_SECTOR, 1, **SMALL_FEDHEAD)),
    "a leader averages": (
        AGGREGATE_SECTOR,
        node_killed("fedhead", AGGREGATE_SECTOR, 1, BEFORE, **SMALL_FEDHEAD),
    ),
    "a member sends again": (HAND_IN, member_killed_handing_in),
    "a leader distils": (
        DISTILL_SECTOR,
        node_killed("fedhead", DISTILL_SECTOR, 1, **SMALL_FEDHEAD),
    ),
}
LATE = ("node-", "did not reply within", "logs")
BACK = ("ended without a word", "memory")
FAULTS = {
    "the ServerApp cannot be imported": RunFault(
        server_import_fails, ("package_that_is_missing", "install"), code=1, journal=False
    ),
    "the ClientApp cannot be imported": RunFault(
        node_import_fails,
        ("node-0", "package_that_is_missing", "install"),
        ("query.describe", "package_that_is_missing", "install"),
        code=1,
    ),
    "the ServerApp is killed, as if out of memory": RunFault(
        serverapp_killed, ("SIGKILL", "resume"), code=1, state="killed", journal=False
    ),
    "the ServerApp gets no more memory": RunFault(
        serverapp_memory, ("MemoryError", "memory is used up"), code=1
    ),
    "the ServerApp hangs": RunFault(
        serverapp_hangs,
        ("server itself", "server_hangs.py", "flwr-distill stop"),
        code=1,
        state="stopped",
    ),
    "the ServerApp hangs, in the queue": RunFault(
        serverapp_hangs_in_the_queue,
        ("25 s", "--timeout"),
        code=1,
        state="stopped",
        within=55.0,
        journal=False,
    ),
    "a node's app is killed, as if out of memory": RunFault(
        worker_takes("EXECUTOR_CHILD_DIES"),
        ("node-", "SIGKILL", "train.batch-size"),
        ("train", "SIGKILL", "train.batch-size"),
    ),
    "a node's app gets no more memory": RunFault(
        worker_takes("OUT_OF_MEMORY"),
        ("node-", "MemoryError", "train.batch-size"),
        ("train", "MemoryError", "train.batch-size"),
    ),
    "a node is killed before it has said its name": RunFault(
        node_killed("fedavg", DESCRIBE, fault=BEFORE), LATE[1:], BACK
    ),
    **{
        f"a node is killed while {phase}": RunFault(cause, (name, *LATE), BACK, code=None)
        for phase, (name, cause) in PHASES.items()
    },
    "a node's policy refuses the run": RunFault(
        policy(strategies=["hfldd"]),
        ("node-0", "policy", "take one of hfldd"),
        ("query.describe", "policy", "take one of hfldd"),
    ),
    "a node refuses the app bundle": RunFault(
        policy(bundles=["0" * 64]),
        ("node-0", "bundles", "add it"),
        ("query.describe", "bundles", "add it"),
    ),
    "a node's data disappear": RunFault(
        data_gone, ("node-", "digits.npz"), ("train", "digits.npz")
    ),
    "two nodes have one name": RunFault(
        same_name, ("ward-3 (2)", "--name"), ("the server says", "ward-3", "--name")
    ),
    "a node has another version": RunFault(
        another_version, ("node-0", "0.0.1", "install"), ("the server says", "0.0.1", "install")
    ),
    "a node is too slow in a phase": RunFault(
        worker_takes("SLOW"),
        ("train", *LATE),
        ("train", "is late after", "phase-timeout"),
        within=45.0,
    ),
    "nobody answers in a phase": RunFault(nobody_answers, ("node-2", *LATE), code=1),
    "the runs folder is full": RunFault(
        results_disk_full, ("No space left", "make room", "resume"), code=1, report=False
    ),
    "a reply breaks off": RunFault(half_a_message, (), ("SuperLink", "doctor")),
    "the network is cut for 5 s": RunFault(network_cut(5), ()),
    "the network is cut for 60 s": RunFault(network_cut(60), LATE, ("SuperLink", "doctor")),
    "the network is cut for 600 s": RunFault(network_cut(600), LATE, ("SuperLink", "doctor")),
    "the SuperLink is killed and started again": RunFault(
        superlink_killed, ("SuperLink does not answer", "start it again"), ("SuperLink", "doctor")
    ),
    "the SuperLink is killed": RunFault(
        superlink_gone,
        ("SuperLink does not answer", "start it again"),
        ("SuperLink", "doctor"),
        code=1,
        state="running",
    ),
}
