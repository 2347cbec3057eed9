"""Panels of the report: virtual data, as a picture and by privacy cards; nodes' own models."""

import base64

from markupsafe import Markup

from flwr_distill.strategies.common.sections import Figure, RunFiles, Section, Table
from flwr_distill.task.words import counted

MOST_OPEN = 12
"""More cards than these wait to be opened."""
COLUMNS = {
    "highest-cosine": "#highest cosine",
    "median-cosine": "#median cosine",
    "least-distance": "#least distance",
    "median-distance": "#median distance",
    "nearer-to-own": "#nearer to own",
    "by-chance": "#by chance",
}
EXPLAINED = (
    "A card tells how near a node's virtual images come to the real ones they were made from: a "
    "cosine of 1 or a distance of 0 is a copy. Nearer to own is the share of them that lie nearer "
    "to an image they were made from than to any held back; by chance is that share if they showed "
    "nothing of single images. Cards measure likeness and prove nothing. What nodes send each "
    "other is sealed for the receiver; the server has none of it."
)
OWN_MODELS = (
    "Nodes keep models of their own: there is no global model, and none was saved. Accuracy is "
    "that of each node's model on its own held-out samples. Where nodes hold few classes, that is "
    "an easier test than one on all classes: compare it with the accuracy on nodes of other runs, "
    "not with their accuracy on the server's test samples."
)


def virtual_data(run: RunFiles) -> Section | None:
    """Return the server's virtual images and the nodes' privacy cards; None without either."""
    cards = {
        run.name(node): numbers
        for entry in run.journal
        for node, numbers in entry.get("nodes", {}).items()
        if "highest-cosine" in numbers
    }
    guaranteed = {
        run.name(node): numbers["virtual-epsilon"]
        for entry in run.journal
        for node, numbers in entry.get("nodes", {}).items()
        if "virtual-epsilon" in numbers
    }
    picture = run.artifact("virtual.png")
    if not (cards or picture or guaranteed):
        return None
    return Section(
        "Virtual data",
        [
            *([_nearest(cards), *_audited(cards), EXPLAINED] if cards else []),
            *([_guarantee(guaranteed)] if guaranteed else []),
        ],
        [_table(cards)] if cards else [],
        [_sheet(picture)] if picture else [],
    )


def own_models(run: RunFiles) -> Section:
    """Return what the accuracy of a run means whose nodes keep models of their own."""
    return Section("Models", [OWN_MODELS])


def _nearest(cards: dict[str, dict[str, float]]) -> str:
    node = max(cards, key=lambda node: cards[node]["highest-cosine"])
    return (
        f"{counted(len(cards), 'node')} sent virtual images; the nearest of all to a real one is "
        f"of {node}, with a cosine of {cards[node]['highest-cosine']:.3f}."
    )


def _audited(cards: dict[str, dict[str, float]]) -> list[str]:
    known = [card for card in cards.values() if "audited-worst" in card]
    if not known:
        return []
    ordinary = max(card["audited-ordinary"] for card in known)
    worst = max(card["audited-worst"] for card in known)
    return [
        f"In an audit of such virtual data as {counted(len(known), 'node')} sent, made of other "
        "images, an attacker who accuses 0.1 % of others falsely found at most "
        f"{ordinary:.1%} of ordinary images, and {worst:.0%} of the most unusual ones."
    ]


def _guarantee(epsilons: dict[str, float]) -> str:
    return (
        f"{counted(len(epsilons), 'node')} sent virtual images made under differential privacy, "
        f"with an epsilon of at most {max(epsilons.values()):g}. How near they come to real images "
        "was not measured, because it would leak information about them."
    )


def _table(cards: dict[str, dict[str, float]]) -> Table:
    rows = [
        [node, *(f"{card[key]:.3f}" if key in card else "-" for key in COLUMNS)]
        for node, card in cards.items()
    ]
    folded = f"Privacy cards of {len(cards)} nodes" if len(cards) > MOST_OPEN else ""
    return Table(["node", *COLUMNS.values()], rows, folded=folded)


def _sheet(picture: bytes) -> Figure:
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return Figure(
        "Virtual images",
        "The server's own virtual images at the end of the run, a row for each class.",
        Markup('<img class="sheet" alt="virtual images by class" src="{}">').format(source),
        wide=True,
    )
