"""`flwr-distill doctor` of a node's machine, before a SuperLink with TLS."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_node_sees_that_the_superlink_answers_is_trusted_and_agrees_on_the_time(
    deployed, tmp_path
):
    files = deployed.issue("node-7")
    where = ("--json", "--superlink", deployed.fleet, "--state-dir", tmp_path)
    done = deployed.ours(
        "doctor", *where, "--root-certificates", files / "ca.crt", "--auth-key", files / "login.key"
    )
    assert done.returncode == 0, done.stdout
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    assert findings["SuperLink"]["state"] == "ok"
    assert abs(findings["clock"]["numbers"]["SuperLink ahead (s)"]) < 1

    done = deployed.ours("doctor", *where)  # with the system's authorities
    assert done.returncode == 1
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    assert "is not trusted" in findings["SuperLink"]["found"]
    assert findings["clock"]["state"] == "unchecked"
