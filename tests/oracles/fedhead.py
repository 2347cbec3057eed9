"""FedHEAD and FedHEAD+ in one process, from the paper's equations alone.

Chowdhury et al., Communication-Efficient Loss Minimization over Heterogeneous Data with Federated
Hierarchical Ensemble Aggregation via Distillation. Client k of sector m has D_km = (x, y) and the
share p_km of all samples. A model w is a dict of tensors, and f(w, x) gives its logits.

Random draws are the caller's: w^1, sectors, leaders, and generators of the order of samples. The
paper does not say which validation set stops distillation: here a random tenth of the samples.
"""

import torch


def cross_entropy(logits, targets):
    """l(f(x; w), target), the mean over x; targets are distributions over the classes."""
    return -(targets * torch.log_softmax(logits, 1)).sum(1).mean()


def epoch(num_samples, batch_size, draws):
    """The minibatches of an epoch: each sample once, in random order."""
    return torch.randperm(num_samples, generator=draws).split(batch_size)


def step(f, w, adam, x, targets):
    """One step of Adam on the loss of a minibatch."""
    adam.zero_grad()
    cross_entropy(f(w, x), targets).backward()
    adam.step()


def adam_of(w, lr, weight_decay):
    """A copy of w to train, and its Adam."""
    w = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    return w, torch.optim.Adam(w.values(), lr=lr, weight_decay=weight_decay)


def mean(models, shares):
    """Eq. 9 and 10: sum_i p_i w_i."""
    return {
        name: sum(p * w[name].detach() for p, w in zip(shares, models, strict=True))
        for name in models[0]
    }


def train(f, w, data, draws, hyper):
    """Eq. 1: n_l epochs on the client's own samples."""
    (x, y), (w, adam) = data, adam_of(w, hyper["lr"], hyper["weight_decay"])
    y = torch.eye(f(w, x).shape[1])[y]
    for _ in range(hyper["n_l"]):
        for i in epoch(len(x), hyper["batch_size"], draws):
            step(f, w, adam, x[i], y[i])
    return w


def teacher(f, models, shares, x):
    """Eq. 4, fbar: sum_i p_i f(x; w_i), where f is the classifier's output, a distribution."""
    with torch.no_grad():
        return sum(p * f(w, x).softmax(1) for p, w in zip(shares, models, strict=True))


def distil(f, models, shares, student, x, draws, epochs, hyper):
    """Eq. 4, L~: at most n epochs of the student on the teacher's outputs for x.

    It stops after `patience` epochs in which the validation loss has not fallen.
    """
    w, adam = adam_of(student, hyper["lr"], hyper["weight_decay"])
    targets = teacher(f, models, shares, x)
    order = torch.randperm(len(x), generator=draws)
    held_out, kept = order[: len(x) // 10], order[len(x) // 10 :]

    def validation_loss():
        with torch.no_grad():
            loss = cross_entropy(f(w, x[held_out]).double(), targets[held_out].double())
        return float(loss)  # in float64, as epochs differ by less than a float32 resolves

    lowest, waited = validation_loss(), 0
    for _ in range(epochs):
        for i in epoch(len(kept), hyper["batch_size"], draws):
            step(f, w, adam, x[kept[i]], targets[kept[i]])
        waited += 1
        if (loss := validation_loss()) < lowest:
            lowest, waited = loss, 0
        if waited == hyper["patience"]:
            break
    return w


def round_of(f, w, data, sectors, leaders, draws, hyper, reference=None):
    """One round of algorithm 1; with a `reference` set D_ref, of FedHEAD+.

    `draws` gives a generator, called with the purpose and the client, or None for the server.
    """
    n = [len(x) for x, _ in data]
    p = [n_k / sum(n) for n_k in n]  # eq. 3: p_km, here by client
    p_m = [sum(p[k] for k in sector) for sector in sectors]  # eq. 3
    within = [[p[k] / total for k in sector] for sector, total in zip(sectors, p_m, strict=True)]
    trained = [train(f, w, own, draws("train", k), hyper) for k, own in enumerate(data)]
    models = [[trained[k] for k in sector] for sector in sectors]
    w_m = [mean(*sector) for sector in zip(models, within, strict=True)]  # eq. 9, by the leaders
    z = mean(w_m, p_m)  # eq. 10, by the server
    z_m = [
        distil(f, *ensemble, z, data[k][0], draws("distil", k), hyper["n_s"], hyper)  # eq. 4
        for k, *ensemble in zip(leaders, models, within, strict=True)
    ]
    w = mean(z_m, p_m)  # by the server
    if reference is None:
        return w
    return distil(f, z_m, p_m, w, reference, draws("distil", None), hyper["n_g"], hyper)
