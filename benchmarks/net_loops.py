"""A client's steps of methods on nets, as bare loops of PyTorch.

Each takes the global net, what the client kept (None at first) and its batches, and gives the net
that the server averages and what the client keeps. Steps are in place, without an optimizer.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

RATE = 0.05


def step(loss, parameters, rate=RATE):
    """Step along the gradient of a loss."""
    slopes = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, slopes, alpha=-rate)


def parameters_of(*nets):
    """Parameters of each net."""
    return [list(net.parameters()) for net in nets]


def divergence(first, second):
    """Kullback-Leibler divergence of outputs, a mean over rows."""
    return F.kl_div(
        F.log_softmax(second, dim=1),
        F.log_softmax(first, dim=1),
        reduction="batchmean",
        log_target=True,
    )


def own_or_copy(own, net):
    """A net of one's own, which starts as the global one."""
    return copy.deepcopy(net) if own is None else own


def fedavg(net, own, batches):
    """FedAvg."""
    net = copy.deepcopy(net)
    (parameters,) = parameters_of(net)
    for X, y in batches:
        step(F.cross_entropy(net(X), y), parameters)
    return net, None


def ditto(net, own, batches, proximal=1.0):
    """Ditto: the own net is pulled towards the global one by an implicit step."""
    shared, own = copy.deepcopy(net), own_or_copy(own, net)
    start, changed, kept = parameters_of(net, shared, own)
    weight = RATE * proximal / (1 + RATE * proximal)
    for X, y in batches:
        step(F.cross_entropy(shared(X), y), changed)
        step(F.cross_entropy(own(X), y), kept)
        with torch.no_grad():
            torch._foreach_lerp_(kept, start, weight)
    return shared, own


def pfedme(net, own, batches, proximal=1.0, n_steps=5, rate=0.1):
    """pFedMe: several steps of the personal net for one of the global net's copy."""
    shared, personal = copy.deepcopy(net), copy.deepcopy(net)
    centre, moved = parameters_of(shared, personal)
    for X, y in batches:
        for _ in range(n_steps):
            slopes = torch.autograd.grad(F.cross_entropy(personal(X), y), moved)
            with torch.no_grad():
                pulls = torch._foreach_sub(moved, centre)
                torch._foreach_add_(moved, pulls, alpha=-RATE * proximal)
                torch._foreach_add_(moved, slopes, alpha=-RATE)
        with torch.no_grad():
            torch._foreach_lerp_(centre, moved, rate * proximal)
    return shared, None


def per_fedavg(net, own, batches, meta_rate=0.1):
    """First-order Per-FedAvg: the gradient after a step, taken from before it."""
    net, batches = copy.deepcopy(net), iter(batches)
    adapted = copy.deepcopy(net)
    here, there = parameters_of(net, adapted)
    for (X, y), (other, target) in zip(batches, batches, strict=True):
        with torch.no_grad():
            torch._foreach_copy_(there, here)
        step(F.cross_entropy(adapted(X), y), there)
        slopes = torch.autograd.grad(F.cross_entropy(adapted(other), target), there)
        with torch.no_grad():
            torch._foreach_add_(here, slopes, alpha=-meta_rate)
    return net, None


def quped(net, own, batches, distillation=0.25):
    """QuPeD: the global net teaches the own one, and follows it."""
    shared, own = copy.deepcopy(net), own_or_copy(own, net)
    changed, kept = parameters_of(shared, own)
    for X, y in batches:
        outputs, others = own(X), shared(X)
        loss = (1 - distillation) * F.cross_entropy(outputs, y)
        step(loss + distillation * divergence(others.detach(), outputs), kept)
        with torch.no_grad():
            outputs = own(X)
        step(distillation * divergence(others, outputs), changed)
    return shared, own


def fml(net, own, batches, weight=0.25):
    """Federated mutual learning: both nets teach each other."""
    shared, own = copy.deepcopy(net), own_or_copy(own, net)
    changed, kept = parameters_of(shared, own)
    for X, y in batches:
        outputs, others = own(X), shared(X)
        loss = weight * F.cross_entropy(outputs, y)
        step(loss + (1 - weight) * divergence(others.detach(), outputs), kept)
        with torch.no_grad():
            outputs = own(X)
        loss = weight * F.cross_entropy(others, y)
        step(loss + (1 - weight) * divergence(outputs, others), changed)
    return shared, own


def apfl(net, own, batches, mixing=0.5):
    """APFL with a fixed share."""
    shared, own, mixed = copy.deepcopy(net), own_or_copy(own, net), copy.deepcopy(net)
    changed, kept, between = parameters_of(shared, own, mixed)
    for X, y in batches:
        with torch.no_grad():
            torch._foreach_copy_(between, changed)
            torch._foreach_lerp_(between, kept, mixing)
        slopes = torch.autograd.grad(F.cross_entropy(mixed(X), y), between)
        with torch.no_grad():
            torch._foreach_add_(kept, slopes, alpha=-RATE * mixing)
        step(F.cross_entropy(shared(X), y), changed)
    return shared, own


def fedper(net, own, batches):
    """FedPer: the last two tensors, weight and bias of the last layer, stay with the client."""
    trained = with_last(net, own)
    (parameters,) = parameters_of(trained)
    for X, y in batches:
        step(F.cross_entropy(trained(X), y), parameters)
    return with_last(trained, list(net.parameters())[-2:]), parameters[-2:]


def fedrep(net, own, batches, head_steps=10):
    """FedRep: steps of the last layer alone, then of the others."""
    trained = with_last(net, own)
    (parameters,) = parameters_of(trained)
    for k, (X, y) in enumerate(batches):
        moving = parameters[-2:] if k < head_steps else parameters[:-2]
        for values in parameters:
            values.requires_grad_(any(values is each for each in moving))
        step(F.cross_entropy(trained(X), y), moving)
    for values in parameters:
        values.requires_grad_(True)
    return with_last(trained, list(net.parameters())[-2:]), parameters[-2:]


def with_last(net, last):
    """Copy of a net with other last tensors, if there are any."""
    net = copy.deepcopy(net)
    if last is not None:
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters())[-2:], last)
    return net


def ppsgd(net, own, batches, common=1.0, local=1.0):
    """PPSGD: the last layer is the sum of a common and an own one, with steps of their own."""
    trained = copy.deepcopy(net)
    (parameters,), factor = parameters_of(trained), common + local
    start = [values.detach().clone() for values in parameters[-2:]]
    own = [torch.zeros_like(values) for values in start] if own is None else own
    with torch.no_grad():
        torch._foreach_add_(parameters[-2:], own)
    for X, y in batches:
        slopes = torch.autograd.grad(F.cross_entropy(trained(X), y), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters[:-2], slopes[:-2], alpha=-RATE)
            torch._foreach_add_(parameters[-2:], slopes[-2:], alpha=-RATE * factor)
    with torch.no_grad():
        moved = torch._foreach_sub(parameters[-2:], torch._foreach_add(start, own))
        for values, first, kept, change in zip(parameters[-2:], start, own, moved, strict=True):
            values.copy_(first + common / factor * change)
            kept.add_(change, alpha=local / factor)
    return trained, own


def fedem(nets, weights, batches):
    """FedEM: every net on rows weighted by how well it explains them."""
    nets, batches = copy.deepcopy(nets), list(batches)
    weights = torch.full((len(nets),), 1 / len(nets)) if weights is None else weights
    with torch.no_grad():
        losses = [
            torch.stack([F.cross_entropy(net(X), y, reduction="none") for net in nets], dim=1)
            for X, y in batches
        ]
        shares = [torch.softmax(torch.log(weights) - each, dim=1) for each in losses]
    for (X, y), share in zip(batches, shares, strict=True):
        for net, own in zip(nets, share.T, strict=True):
            loss = (own * F.cross_entropy(net(X), y, reduction="none")).mean()
            step(loss, list(net.parameters()))
    return nets, torch.cat(shares).mean(dim=0)


def adamix(centres, own, batches, proximal=0.1):
    """AdaMix: an own net is pulled towards the mean centre; differences from each are sent."""
    own = own_or_copy(own, centres[0])
    (kept,), n = parameters_of(own), len(centres)
    with torch.no_grad():
        towards = [
            torch.stack(each).mean(dim=0) for each in zip(*parameters_of(*centres), strict=True)
        ]
    weight = RATE * proximal / (1 + RATE * proximal)
    for X, y in batches:
        step(F.cross_entropy(own(X), y), kept)
        with torch.no_grad():
            torch._foreach_lerp_(kept, towards, weight)
    sent = copy.deepcopy(centres)
    with torch.no_grad():
        for centre in sent:
            torch._foreach_lerp_(list(centre.parameters()), kept, 1 / n)
    return sent, own


def several(make, n):
    """Recipe of several nets as one module."""
    return lambda: nn.ModuleList(make() for _ in range(n))
