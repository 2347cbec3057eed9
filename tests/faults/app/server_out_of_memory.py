"""Our ServerApp, which takes all memory after its first round."""

from .memory import allocate
from .rounds import app_that_does

app = app_that_does(lambda server_round: allocate() if server_round == 1 else None)
