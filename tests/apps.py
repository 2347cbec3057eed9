"""Apps that tests write."""


def pyproject(name: str, config: str = "") -> str:
    """Settings of an app whose code is in the package of this name."""
    return f"""
[project]
name = "{name}-app"
version = "1.0.0"
description = "A test's app"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"
[tool.flwr.app.config]
{config}
"""
