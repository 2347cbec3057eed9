"""A side of an app that imports a package which is installed nowhere."""

import package_that_is_missing  # type: ignore[import-not-found]

app = package_that_is_missing.app
