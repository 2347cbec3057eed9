"""FedHEAD's paper as loops, direct links without a wire, and what a strategy is made from."""

import copy
import hashlib

import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.client.training import train_round
from flwr_distill.distill.ensemble import distil_ensemble, teacher_probabilities
from flwr_distill.links.folder import LinkFolder
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TrainSettings

FIRST_NODE = 2**64 - 1000  # as in the conftest above


class ByHand:
    """FedHEAD's round by hand: models in a dict, and the paper's sums as loops."""

    def __init__(self, num_nodes, run_config, model, tmp_path):
        self.model = model
        self.sessions = {
            FIRST_NODE + i: Session.of(
                Context(
                    999,
                    FIRST_NODE + i,
                    {"partition-id": i, "num-partitions": num_nodes, "state-dir": str(tmp_path)},
                    RecordDict(),
                    run_config,
                )
            )
            for i in range(num_nodes)
        }

    def size(self, node):
        return len(self.sessions[node].data.train)

    def trained(self, node, weights, server_round=1):
        session, model = self.sessions[node], copy.deepcopy(self.model)
        model.load_state_dict(weights)
        draws = session.generator("train", server_round)
        train_round(model, session.data.train, session.task.train, draws)
        return model

    def mean(self, weighted):
        total = sum(weight for weight, _ in weighted)
        return {
            name: sum(w / total * state[name].double() for w, state in weighted).float()
            for name in self.model.state_dict()
        }

    def fedhead_round(self, clusters, weights, server_round=1, **distilling):
        """Steps 1 to 5: z_m of each sector with its weight."""
        means, teachers = [], []
        for cluster in clusters:
            nodes = (cluster.head, *cluster.members)
            models = [(self.size(n), self.trained(n, weights, server_round)) for n in nodes]
            states = [(size, model.state_dict()) for size, model in models]
            means.append((sum(size for size, _ in models), self.mean(states)))
            inputs = self.sessions[cluster.head].data.train.inputs
            teachers.append(teacher_probabilities(models, inputs))
        z = self.mean(means)
        students = []
        for cluster, teacher, (size, _) in zip(clusters, teachers, means, strict=True):
            session, student = self.sessions[cluster.head], copy.deepcopy(self.model)
            student.load_state_dict(z)
            draws = session.generator("distill-sector", server_round)
            inputs = session.data.train.inputs
            distil_ensemble(student, inputs, teacher, epochs=3, generator=draws, **distilling)
            students.append((size, student.state_dict()))
        return students


@pytest.fixture
def by_hand(tmp_path):
    """Make the oracle of a federation."""

    def federation(num_nodes, run_config, model):
        return ByHand(num_nodes, run_config, model, tmp_path)

    return federation


@pytest.fixture
def direct(tmp_path, monkeypatch):
    """Direct links without the wire: a parcel goes straight into the receiver's mailbox."""
    import flwr_distill.links.transfer

    unreachable = []

    def deliver(sealed, to, run_id, credentials, timeout):
        if int(to.receiver) in unreachable:
            raise flwr_distill.links.transfer.LinkError("no connection")
        store = NodeStore.open(str(tmp_path / "state"), run_id, int(to.receiver))
        checksum = hashlib.sha256(sealed).hexdigest()
        LinkFolder(store).put(to.token, [sealed], len(sealed), checksum)

    monkeypatch.setattr(flwr_distill.links.transfer, "deliver", deliver)
    return unreachable


@pytest.fixture
def a_run():
    """Make what the ServerApp gives a strategy, with some fields changed."""

    def of(**changed):
        spec = load_dataset("digits").spec
        fields = {
            "seed": 7,
            "model": create_model("auto", spec, seed=0),
            "spec": spec,
            "device": torch.device("cpu"),
            "train": TrainSettings(proximal_mu=0.25),
            "data_root": "",
            "links": "relay",
            "phase_timeout": 5.0,
            "fraction_train": 0.5,
            "fraction_evaluate": 0.25,
            "directory": Directory(),
            "create": None,
        }
        return Run(**{**fields, **changed})

    return of
