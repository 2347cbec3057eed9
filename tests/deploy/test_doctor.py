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
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert found["SuperLink"]["state"] == "ok"
    assert abs(found["clock"]["numbers"]["SuperLink ahead (s)"]) < 1

    done = deployed.ours("doctor", *where)  # with the system's authorities
    assert done.returncode == 1
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert "is not trusted" in found["SuperLink"]["found"]
    assert found["clock"]["state"] == "unchecked"
