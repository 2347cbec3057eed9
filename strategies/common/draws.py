"""The server's draws in a round."""

import numpy as np
import torch


def round_generator(seed: int, server_round: int) -> torch.Generator:
    """CPU generator of a round's draws, the same in a resumed run."""
    words = np.random.SeedSequence([seed, server_round]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
