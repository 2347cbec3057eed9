"""PyTorch's compiler stays out of memory until something is compiled, and then all is as ever."""

import json
import subprocess
import sys
from typing import Any

import pytest

BEGIN = """
import inspect, json, sys
import torch
from flwr_distill.node.compiler import COMPILER, put_off_compiler

put_off_compiler()
put_off_compiler()

def is_here():
    return "torch._dynamo.eval_frame" in sys.modules

def trained():
    results = []
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.arange(1.0, 4.0))
        optimizer = make([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        results.append(weight.tolist())
    return results
"""
STORY = """
seen = {"trained without": trained()}
for module in list(sys.modules.values()):
    hasattr(module, "__file__")
inspect.getmodule(compile("0", "nowhere", "exec"))
seen["after a look through all modules"] = is_here()

def inner(x):
    return x + (1 if torch.compiler.is_compiling() else 2)

disabled = torch._dynamo.disable(inner, True, wrapping=False)
seen["disabled without"] = [disabled(1), is_here()]
compiled = torch.compile(lambda x: disabled(x) * 2, backend="eager")
seen["disabled in what is compiled"] = compiled(torch.ones(1)).item()
seen["here"] = is_here() and torch._dynamo is sys.modules[COMPILER]
seen["kind"] = type(torch._dynamo).__name__
seen["trained with"] = trained()
put_off_compiler()
seen["still here"] = type(torch._dynamo).__name__
print(json.dumps(seen))
"""


def run(code: str) -> str:
    results = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert results.returncode == 0, results.stderr
    return results.stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a process saw that trains, then compiles, then trains again."""
    story: dict[str, Any] = json.loads(run(BEGIN + STORY))
    return story


def test_optimisers_train_to_the_same_weights_without_it(seen: dict[str, Any]) -> None:
    assert seen["trained without"] == seen["trained with"]


def test_neither_training_nor_a_look_through_all_modules_imports_it(seen: dict[str, Any]) -> None:
    assert seen["after a look through all modules"] is False


def test_it_keeps_out_of_functions_that_were_named_before_it_came(seen: dict[str, Any]) -> None:
    assert seen["disabled without"] == [3, False]
    assert seen["disabled in what is compiled"] == 6


def test_once_something_is_compiled_everyone_has_the_compiler_itself(seen: dict[str, Any]) -> None:
    assert seen["here"]
    assert seen["kind"] == seen["still here"] == "module"


def test_a_module_of_it_that_is_asked_for_first_is_the_one_that_it_uses() -> None:
    code = """
import torch._dynamo.config as asked
import torch._dynamo.utils
torch._dynamo.config.cache_size_limit = 3
used = sys.modules["torch._dynamo.convert_frame"]
print(used.config is asked, used.config.cache_size_limit)
utils = torch._dynamo.utils
print(used.counters is utils.counters)
print(type(utils.__spec__.loader) is type(torch._dynamo.__spec__.loader))
"""
    assert run(BEGIN + code).split() == ["True", "3", "True", "True"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import optimize",
        "torch._dynamo.reset()",
        "torch.compiler.disable(print)",
        "torch._dynamo.disable(recursive=False)",
    ],
)
def test_whoever_uses_it_gets_the_compiler_itself(use: str) -> None:
    after = "print(is_here(), type(torch._dynamo).__name__, len(trained()))"
    assert run(f"{BEGIN}\nassert not is_here()\n{use}\n{after}").split() == ["True", "module", "3"]


def test_without_pytorch_nothing_is_put_off() -> None:
    code = "import sys\nfrom flwr_distill.node.compiler import COMPILER, put_off_compiler\n"
    code += "put_off_compiler()\n"
    assert run(f"{code}print(COMPILER in sys.modules)").strip() == "False"
