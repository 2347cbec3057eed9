"""HFLDD in one process, from the paper's equations alone.

Shi et al., Dataset Distillation-based Hybrid Federated Learning on Non-IID Data. Client i has the
samples D_i = (x, y), with labels y or distributions over the classes. A model w is a dict of
tensors, and f(w, x) gives its logits. Random draws are the caller's.
"""

import torch


def cross_entropy(logits, y):
    """Mean over the samples; y are distributions over the classes."""
    return -(y * logits.log_softmax(1)).sum(1).mean()


def sgd(f, w, x, y, batches, lr):
    """Eq. 5: w <- w - eta grad F(w, xi), a step a minibatch."""
    for i in batches:
        leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
        gradients = torch.autograd.grad(cross_entropy(f(leaves, x[i]), y[i]), list(leaves.values()))
        w = {n: value - lr * g for (n, value), g in zip(w.items(), gradients, strict=True)}
    return w


def epoch(num_samples, batch_size, draws):
    """The minibatches of an epoch: each sample once, in random order."""
    return torch.randperm(num_samples, generator=draws).split(batch_size)


def label_knowledge(f, w, x, y, global_set, draws, hyper):
    """S_i: softmax of w_i^0 = train(D_i, eta, w^0, E1) on D_g, |D_g| x N_c. E1 counts steps."""
    batches = []
    while len(batches) < hyper["E1"]:
        batches += epoch(len(x), hyper["first_batch_size"], draws)
    w = sgd(f, w, x, y, batches[: hyper["E1"]], hyper["first_lr"])
    return f(w, global_set).softmax(1)


def similarity(knowledge):
    """Eq. 4: M_ij = 1/|D_g| sum_k sum_c S_ik^c log(S_ik^c / S_jk^c)."""
    m = torch.zeros(len(knowledge), len(knowledge), dtype=torch.float64)
    for i, s_i in enumerate(knowledge):
        for j, s_j in enumerate(knowledge):
            m[i, j] = (s_i.double() * torch.log(s_i.double() / s_j.double())).sum() / len(s_i)
    return m


def k_means(points, groups):
    """Lloyd's iteration from these groups on: sets of rows of M, by nearest centre."""
    while True:
        centres = torch.stack([points[sorted(group)].mean(0) for group in groups if group])
        nearest = torch.cdist(points, centres).argmin(1).tolist()
        moved = [{i for i, g in enumerate(nearest) if g == k} for k in range(len(centres))]
        if moved == groups:
            return groups
        groups = moved


def spread(points, groups):
    """What K-means minimises: squared distances to the centre of the group, summed."""
    members = [points[sorted(group)] for group in groups if group]
    return float(sum(((rows - rows.mean(0)) ** 2).sum() for rows in members))


def cluster_sampling(groups, draw):
    """Algorithm 1: while any group has clients, move a random one of each to a new cluster."""
    left, clusters = [set(group) for group in groups], []
    while any(left):
        cluster = {draw(group) for group in left if group}
        left = [group - cluster for group in left]
        clusters.append(cluster)
    return clusters


def kip_loss(x_t, y_t, x_s, y_s, kernel, lam, relative):
    """Eq. 1: L(S) = 1/2 || Y_T - K_TS (K_SS + lambda I)^-1 Y_S ||^2.

    In version b of the paper lambda is `relative` to the mean of K_SS' diagonal.
    """
    k_ss, k_ts = kernel(x_s, x_s), kernel(x_t, x_s)
    ridge = lam * k_ss.diag().mean() if relative else lam
    inverse = torch.linalg.inv(k_ss + ridge * torch.eye(len(x_s), dtype=k_ss.dtype))
    return 0.5 * ((y_t - k_ts @ inverse @ y_s) ** 2).sum()


def round_of(f, w, pools, draws, hyper):
    """Algorithm 2: each head trains E2 epochs on D_h; models are averaged by their data.

    `pools` has D_h = (x, y) of each head: its own samples and the distilled ones of its members.
    """
    trained = []
    for h, (x, y) in enumerate(pools):
        generator = draws(h)
        batches = [
            i for _ in range(hyper["E2"]) for i in epoch(len(x), hyper["batch_size"], generator)
        ]
        trained.append(sgd(f, w, x, y, batches, hyper["lr"]))
    n = [len(x) for x, _ in pools]
    return {
        name: sum(n_h / sum(n) * w_h[name] for n_h, w_h in zip(n, trained, strict=True))
        for name in w
    }
