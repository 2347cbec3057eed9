"""CADIS in one process, from the paper's equations alone.

Nguyen et al., CADIS: Handling Cluster-skewed Non-IID Data in Federated Learning with Clustered
Aggregation and Knowledge DIStilled Regularization. Client i has the samples (x, y). A model w is a
dict of tensors; f(w, x) gives its logits and r, the inputs of its last dense layer, whose weights
are W = w[last].
"""

import math

import torch


def relations(r, kernel):
    """Eq. 18: p_{j|i} = K(r_i, r_j) / sum_{k != i} K(r_i, r_k), n x n with zeros for j = i."""
    similar = kernel(r) * (1 - torch.eye(len(r)))
    return similar / similar.sum(1, keepdim=True)


def divergence(teacher, student):
    """Eq. 19: sum_i sum_{j != i} p^T log(p^T / p^S)."""
    other = ~torch.eye(len(teacher), dtype=torch.bool)
    p_t, p_s = teacher[other], student[other]
    return (p_t * torch.log(p_t / p_s)).sum()


def loss(f, w, w_t, x, y, kernel, lam):
    """Eq. 20 for a minibatch: L_CE + lambda KL; w_t is the global model before the round."""
    logits, r = f(w, x)
    with torch.no_grad():
        _, r_t = f(w_t, x)
    ce = -logits.log_softmax(1)[torch.arange(len(y)), y].mean()  # eq. 5
    return ce + lam * divergence(relations(r_t, kernel), relations(r, kernel))


def train(f, w_t, data, draws, kernel, hyper):
    """SGD on eq. 20, for the local epochs."""
    (x, y), w = data, {name: value.clone() for name, value in w_t.items()}
    for _ in range(hyper["epochs"]):
        for i in torch.randperm(len(x), generator=draws).split(hyper["batch_size"]):
            leaves = {name: value.requires_grad_() for name, value in w.items()}
            batch_loss = loss(f, leaves, w_t, x[i], y[i], kernel, hyper["lambda"])
            gradients = torch.autograd.grad(batch_loss, list(leaves.values()))
            w = {
                name: (value - hyper["lr"] * g).detach()
                for (name, value), g in zip(leaves.items(), gradients, strict=True)
            }
    return w


def instance_similarity(changes):
    """Eq. 11: s_ij = cos(W_i - W, W_j - W), for pairs of participants; a dict."""

    def cos(a, b):
        return float((a * b).sum() / (a.norm() * b.norm()))

    return {(i, j): cos(changes[i], changes[j]) for i in changes for j in changes if i != j}


def cumulative(mean, met, s):
    """Eq. 12: S <- ((m - 1) S + s) / m, m the rounds in which both took part; in place."""
    for pair, value in s.items():
        met[pair] = met.get(pair, 0) + 1
        mean[pair] = ((met[pair] - 1) * mean.get(pair, 0.0) + value) / met[pair]


def transitive(mean, seen, threshold, normal):
    """Estimates for pairs that never met, each a mean over k of draws N(S_ik S_jk, sigma)."""
    full = dict(mean)
    for i in seen:
        for j in seen:
            if i < j and (i, j) not in mean:
                drawn = []
                for k in seen:
                    if (i, k) in mean and (j, k) in mean:
                        a, b = mean[i, k], mean[j, k]
                        sigma = math.sqrt(max(0.0, (1 - a * a) * (1 - b * b)))
                        if sigma < threshold:
                            drawn.append(normal(a * b, sigma))
                if drawn:
                    full[i, j] = full[j, i] = sum(drawn) / len(drawn)
    return full


def rescaled(similarities):
    """Q matrix: S min-max rescaled to [0, 1]."""
    low, high = min(similarities.values()), max(similarities.values())
    return {pair: (s - low) / (high - low) for pair, s in similarities.items()}


def cluster_sizes(q, seen, eps):
    """Eq. 13: j is in the cluster of i if Q_ij >= eps; i itself is."""
    return {i: 1 + sum(q.get((i, j), 0.0) >= eps for j in seen if j != i) for i in seen}


def weights(sizes, samples, participants):
    """Eq. 1 and 2: u_i ~ n_i / (n |cluster of i|), normalised over the participants."""
    raw = {i: samples[i] / sum(samples.values()) / sizes[i] for i in participants}
    return {i: u / sum(raw.values()) for i, u in raw.items()}
