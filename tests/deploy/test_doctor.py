"""`flwr-distill doctor` of a node's machine, before a SuperLink with TLS."""

import json

import pytest

from tests.environments import flwr_distill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_node_sees_that_the_superlink_answers_is_trusted_and_agrees_on_the_time(
    deployed, tmp_path
):
    files = deployed.issue("node-7")
    where = ("--json", "--superlink", deployed.fleet, "--state-dir", tmp_path)
    own = ("--root-certificates", files / "ca.crt", "--auth-key", files / "login.key")
    printed = flwr_distill(deployed.env, "doctor", *where, *own)
    findings = {each["check"]: each for each in json.loads(printed)}
    assert findings["SuperLink"]["state"] == "ok"
    assert abs(findings["clock"]["numbers"]["SuperLink ahead (s)"]) < 1

    printed = flwr_distill(deployed.env, "doctor", *where, code=1)  # with the system's authorities
    findings = {each["check"]: each for each in json.loads(printed)}
    assert "is not trusted" in findings["SuperLink"]["found"]
    assert findings["clock"]["state"] == "unchecked"
