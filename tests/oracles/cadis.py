"""CADIS in one process, from the paper's equations alone.

Nguyen et al., CADIS: Handling Cluster-skewed Non-IID Data in Federated Learning with Clustered
Aggregation and Knowledge DIStilled Regularization. Client i has the samples (x, y). A model w is a
dict of tensors; f(w, x) gives its logits and r, the inputs of its last dense layer, whose weights
are w[last]. Participants and all random draws are the caller's.

The text at hand has lost its formulae, which were rebuilt from its words. Of what it leaves open,
the published code has `centred`, `one_step`, and how eps rises.
"""

import math

import torch


def gaussian(r):
    """K of eq. 18, exp(-d_ij^2 / (2 sigma^2)); sigma^2 is lost, here the mean of d^2."""
    d, other = distances(r)
    return torch.exp(-(d**2) / (2 * (d[other] ** 2).mean()))


def centred(r):
    """K of the published code: exp(-(d_ij - mean d)^2 / (2 (std(d)^2 + 0.001)))."""
    d, other = distances(r)
    return torch.exp(-((d - d[other].mean()) ** 2) / (2 * (d[other].std() ** 2 + 0.001)))


def distances(r):
    """d_ij = ||r_i - r_j||, and where j != i."""
    return (r[:, None] - r[None]).norm(dim=2), ~torch.eye(len(r), dtype=torch.bool)


def relations(r, kernel):
    """Eq. 18: p_{j|i} = K(r_i, r_j) / sum_{k != i} K(r_i, r_k), and 0 for j = i."""
    similar = kernel(r) * (1 - torch.eye(len(r)))
    return similar / similar.sum(1, keepdim=True)


def divergence(teacher, student):
    """Eq. 19: sum_i sum_{j != i} p^T log(p^T / p^S)."""
    other = ~torch.eye(len(teacher), dtype=torch.bool)
    return (teacher[other] * torch.log(teacher[other] / student[other])).sum()


def loss(f, w, w_t, x, y, kernel, lam):
    """Eq. 20 for a minibatch: L_CE + lambda KL; w_t is the global model before the round."""
    (logits, r), (_, r_t) = f(w, x), f(w_t, x)
    cross_entropy = -logits.log_softmax(1)[torch.arange(len(y)), y].mean()  # eq. 4 and 5
    return cross_entropy + lam * divergence(relations(r_t, kernel), relations(r, kernel))


def train(f, w_t, data, draws, hyper):
    """SGD on eq. 20, for the local epochs; a last partial minibatch is dropped."""
    (x, y), w, size = data, w_t, hyper["batch_size"]
    for _ in range(hyper["epochs"]):
        order = torch.randperm(len(x), generator=draws)
        for i in order[: len(x) // size * size].split(size):
            leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
            of_batch = loss(f, leaves, w_t, x[i], y[i], hyper["kernel"], hyper["lambda"])
            gradients = torch.autograd.grad(of_batch, list(leaves.values()))
            steps = zip(w.items(), gradients, strict=True)
            w = {name: value - hyper["lr"] * g for (name, value), g in steps}
    return w


def instance_similarity(changes):
    """Eq. 11: s_ij = cos(W_i - W, W_j - W), for all pairs of participants."""
    return {
        (i, j): float((a * b).sum() / (a.norm() * b.norm()))
        for i, a in changes.items()
        for j, b in changes.items()
        if i != j
    }


def cumulate(mean, met, s):
    """Eq. 12: S <- ((m - 1) S + s) / m, m the rounds in which both took part; in place."""
    for pair, value in s.items():
        met[pair] = met.get(pair, 0) + 1
        mean[pair] = ((met[pair] - 1) * mean.get(pair, 0.0) + value) / met[pair]


def estimates(mean, seen, max_sigma, normal):
    """Transitive learning: S_ij of pairs that never met, the mean of draws N(S_ik S_jk, sigma).

    Each k with sigma = sqrt((1 - S_ik^2) (1 - S_jk^2)) below a threshold makes one. Their mean is
    one draw of N(mean S_ik S_jk, sqrt(sum sigma^2) / how many).
    """
    found = {}
    for place, i in enumerate(seen):
        for j in seen[place + 1 :]:
            through = []
            for k in seen:
                if (i, j) not in mean and (i, k) in mean and (j, k) in mean:
                    a, b = mean[i, k], mean[j, k]
                    sigma = math.sqrt((1 - a**2) * (1 - b**2))
                    if sigma < max_sigma:
                        through.append((a * b, sigma))
            if n := len(through):
                deviation = math.sqrt(sum(sigma**2 for _, sigma in through)) / n
                found[i, j] = found[j, i] = normal(sum(m for m, _ in through) / n, deviation)
    return found


def rescaled(similarity):
    """Q matrix: S min-max rescaled to [0, 1]."""
    low, high = min(similarity.values()), max(similarity.values())
    return {pair: (s - low) / (high - low) for pair, s in similarity.items()}


def clusters(q, seen, eps):
    """Eq. 13: j is in the cluster of i if Q_ij >= eps; i itself is."""
    return {i: {i} | {j for j in seen if q.get((i, j), -1.0) >= eps} for i in seen}


def one_step(members):
    """Of the published code: a partner's partners are in the cluster too."""
    return {i: set().union(*(members[j] for j in own)) for i, own in members.items()}


def weights(members, samples):
    """Eq. 1 and 2: u_i ~ n_i / |cluster of i|, normalised over the participants."""
    u = {i: n / len(members[i]) for i, n in samples.items()}
    return {i: value / sum(u.values()) for i, value in u.items()}


class Server:
    """The server: the global model w, S with its counts, the clients seen, eps and the round t."""

    def __init__(self, f, w, last, data, hyper):
        self.f, self.w, self.last, self.data, self.hyper = f, w, last, data, hyper
        self.mean, self.met, self.seen = {}, {}, []
        self.eps, self.t = hyper["eps"], 0

    def round(self, participants, draws, normal):
        """One round: `draws` gives a participant's generator, `normal` a draw of N(mean, sigma)."""
        trained = {
            i: train(self.f, self.w, self.data[i], draws(i), self.hyper) for i in participants
        }
        changes = {i: (w[self.last] - self.w[self.last]).double() for i, w in trained.items()}
        cumulate(self.mean, self.met, instance_similarity(changes))
        self.seen += [i for i in participants if i not in self.seen]
        known = self.mean | estimates(self.mean, self.seen, self.hyper["max_sigma"], normal)
        members = self.hyper["closure"](clusters(rescaled(known), self.seen, self.eps))
        u = weights(members, {i: len(self.data[i][0]) for i in participants})
        self.w = {name: sum(u[i] * trained[i][name] for i in u) for name in self.w}
        self.eps = min(self.eps * self.hyper["growth"] ** self.t, self.hyper["max_eps"])
        self.t += 1
