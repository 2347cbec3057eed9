"""FedLGD in one process, from the paper's equations alone.

Huang et al., Federated Learning on Virtual Heterogeneous Data with Local-Global Dataset
Distillation. Client c has real samples D^c and virtual ones D~^c, the server virtual ones D~^g;
each is (x, y). A model w is a dict of tensors; f(w, x) gives its logits, psi(w, x) its features.
Random draws are the caller's, and what the paper leaves open: which optimiser moves pixels, and
how virtual data are stored.
"""

import torch


def cross_entropy(logits, y):
    """Eq. 3: the mean of - sum_k y_k log y^_k."""
    return -logits.log_softmax(1)[torch.arange(len(y)), y].mean()


def mmd(psi_real, y_real, psi_virtual, y_virtual):
    """Eq. 1: sum_k || mean_i psi(x_i) - mean_j psi(x~_j) ||^2, over real and virtual of class k."""
    return sum(
        ((psi_real[y_real == k].mean(0) - psi_virtual[y_virtual == k].mean(0)) ** 2).sum()
        for k in sorted(set(y_virtual.tolist()))
    )


def iterative_dm(psi, w, real, virtual, steps, optimizer):
    """IterativeDM: descend eq. 1 over x~, with the features of the current global model w."""
    (x, y), (x_v, y_v) = real, virtual
    x_v = x_v.clone().requires_grad_()
    descent = optimizer([x_v])
    with torch.no_grad():
        psi_real = psi(w, x)
    for _ in range(steps):
        descent.zero_grad()
        mmd(psi_real, y, psi(w, x_v), y_v).backward()
        descent.step()
    return x_v.detach(), y_v


def contrastive(features, y, temperature):
    """Eq. 4: sum_j - 1/|B_-j^y_j| sum_p log( exp(psi_j.psi_p/tau) / sum_a exp(psi_j.psi_a/tau) ).

    The paper does not say whether psi is normalised: here it is, as where the loss comes from.
    """
    features, total = features / features.norm(dim=1, keepdim=True), torch.zeros(())
    for j in range(len(y)):
        others = [a for a in range(len(y)) if a != j]  # B_-j
        same = [p for p in others if y[p] == y[j]]  # B_-j of class y_j
        similar = features @ features[j] / temperature
        if same:
            total = total - (similar[same] - similar[others].logsumexp(0)).mean()
    return total


def train(f, psi, w, batches, lam, temperature, lr):
    """SGD on eq. 2, L_CE + lambda L_Con; lambda is 0 in selected rounds, which go without D~^g."""
    for x, y in batches:
        leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
        loss = cross_entropy(f(leaves, x), y)
        if lam:
            loss = loss + lam * contrastive(psi(leaves, x), y, temperature)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        w = {n: value - lr * g for (n, value), g in zip(w.items(), gradients, strict=True)}
    return w


def gradient(f, w, x, y, create_graph=False):
    """grad_theta L_CE on virtual data, by layer: of its weights, a row for each output node."""
    leaves = {name: value.detach().requires_grad_() for name, value in w.items()}
    of_layers = torch.autograd.grad(
        cross_entropy(f(leaves, x), y), list(leaves.values()), create_graph=create_graph
    )
    return {name: g.flatten(1) for name, g in zip(w, of_layers, strict=True) if g.ndim > 1}


def dist(s, t):
    """Eq. 6: sum over layers and output nodes of 1 - S_i.T_i / (||S_i|| ||T_i||)."""
    return sum(
        1 - (s_i @ t_i) / (s_i.norm() * t_i.norm())
        for layer in s
        for s_i, t_i in zip(s[layer], t[layer], strict=True)
    )


def federated_gm(f, w, virtual, target, steps, optimizer):
    """FederatedGM, eq. 5: descend Dist(grad on D~^g, mean of the clients' gradients) over x~."""
    x, y = virtual[0].clone().requires_grad_(), virtual[1]
    descent = optimizer([x])
    for _ in range(steps):
        descent.zero_grad()
        dist(gradient(f, w, x, y, create_graph=True), target).backward()
        descent.step()
    return x.detach(), y


def mean(of_clients):
    """1/N sum_c, of models or gradients."""
    return {n: sum(one[n] for one in of_clients) / len(of_clients) for n in of_clients[0]}


def minibatches(x, y, draws, hyper):
    """Local epochs of minibatches, each sample once an epoch, in random order."""
    for _ in range(hyper["epochs"]):
        for i in torch.randperm(len(x), generator=draws).split(hyper["batch_size"]):
            yield x[i], y[i]


def round_of(f, psi, w, real, own, server, selected, draws, hyper, stored):
    """One round of algorithm 1: the new model, and the virtual data of clients and server.

    `real` and `own` are D^c and D~^c of each client, `server` is D~^g; `draws` gives a client's
    generator, and `stored` virtual data as they are stored.
    """
    models, gradients, optimizer = [], [], hyper["optimizer"]
    for c, data in enumerate(real):
        if selected:
            own[c] = stored(iterative_dm(psi, w, data, own[c], hyper["local_steps"], optimizer))
            gradients.append(gradient(f, w, *own[c]))
            joint, lam = own[c], 0.0
        else:
            joint = tuple(torch.cat(part) for part in zip(own[c], server, strict=True))
            lam = hyper["lambda"]
        batches = minibatches(*joint, draws(c), hyper)
        models.append(train(f, psi, w, batches, lam, hyper["temperature"], hyper["lr"]))
    if selected:
        target = mean(gradients)
        server = stored(federated_gm(f, w, server, target, hyper["global_steps"], optimizer))
    return mean(models), own, server
