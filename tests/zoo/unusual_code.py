"""Modules whose code does what tracers, hooks and files do not expect."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from tests.zoo.cases import Animal, Inputs

_SIDES = (12, 16, 24)
_STEPS = (7, 12, 20)


def _images(batch: int, size: int) -> Inputs:
    return (torch.randn(batch, 3, _SIDES[size], _SIDES[size]),)


def _rows(batch: int, _: int) -> Inputs:
    return (torch.randn(batch, 32),)


@dataclasses.dataclass
class Scene:
    """An image, and by what to multiply it."""

    image: torch.Tensor
    scale: Any = None


@dataclasses.dataclass
class Found:
    """Features and classes."""

    features: list[torch.Tensor]
    classes: torch.Tensor
    extra: Any = None


class OfScenes(nn.Module):
    """Takes a dataclass and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.c = nn.Linear(32, 5)

    def forward(self, scene: Scene) -> Found:
        x = scene.image if scene.scale is None else scene.image * scene.scale
        first = F.relu(self.a(x))
        second = F.relu(self.b(first))
        return Found([first, second], self.c(second.mean((2, 3))))


class Leaky(nn.Module):
    """To be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.1 * x)


def scripted_inside() -> nn.Module:
    """A network with an activation that torch.jit has compiled."""
    act: Any = torch.jit.script(Leaky())
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), act, nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )


class SparseGraph(nn.Module):
    """Multiplies by a sparse matrix of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(torch.sparse.mm(neighbours, x)))
        return self.b(torch.sparse.mm(neighbours, x))


class FixedGraph(SparseGraph):
    """Has its neighbours in buffers, of two layouts."""

    def __init__(self, nodes: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        dense = (torch.rand(nodes, nodes, generator=generator) < 0.3).float() + torch.eye(nodes)
        self.register_buffer("rows", (dense / dense.sum(1, keepdim=True)).to_sparse_csr())
        self.register_buffer("pairs", (dense / dense.sum(0)).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Each layer behind one of the two."""
        return self.b(torch.sparse.mm(self.pairs, F.relu(self.a(torch.sparse.mm(self.rows, x)))))


def _sparse(batch: int, size: int) -> Inputs:
    count = 8 * batch
    dense = torch.zeros(count, count)
    for shift in range(size + 2):  # as many neighbours for each
        dense += torch.eye(count).roll(shift, 0) / (size + 2)
    return torch.randn(count, 16), dense.to_sparse()


class OtherPrecision(nn.Module):
    """A layer in the middle computes in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
        self.b = nn.Conv2d(16, 16, 3).to(dtype)
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(F.relu(self.a(x)).to(self._dtype)).float())


class Energy(nn.Module):
    """Returns the gradient of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.Sequential(nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.n(x).sum(), x)
        return self.n(x.detach()), self.last(gradient)


class WithLoss(nn.Module):
    """Given targets, it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[Any, ...]:
        y = self.f(x)
        return (y,) if labels is None else (F.cross_entropy(y, labels), y)


class Decodes(nn.Module):
    """Boxes from a grid made for the size at hand."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in ((3, 16), (16, 32)):
            layers += [nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.SiLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(32, 27, 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30], [33, 23]]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.head(self.body(x))
        b, _, ny, nx = p.shape
        p = p.view(b, 3, 9, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
        ys, xs = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
        grid = torch.stack((xs, ys), 2).float().view(1, 1, ny, nx, 2)
        y = p.sigmoid()
        where = (y[..., 0:2] * 2 - 0.5 + grid) * 4
        extent = (y[..., 2:4] * 2) ** 2 * self.anchors.view(1, 3, 1, 1, 2)
        return torch.cat((where, extent, y[..., 4:]), -1).view(b, -1, 9), p


class MakesConstants(nn.Module):
    """Normalises by numbers that it makes tensors of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mean, self.std = nn.Conv2d(3, 8, 3), [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.tensor(self.mean, dtype=x.dtype).view(1, -1, 1, 1)
        return self.a((x - mean) / torch.as_tensor(self.std).view(1, -1, 1, 1))


class Ensemble(nn.Module):
    """Several networks as one, by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(3)
        )
        self.stem = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, buffers = stack_module_state(list(self.m))

        def one(weights: Any, buffers: Any, x: torch.Tensor) -> Any:
            return functional_call(self.m[0], (weights, buffers), (x,))

        found: torch.Tensor = vmap(one, in_dims=(0, 0, None))(weights, buffers, self.stem(x))
        return found.mean(0)


class ThroughNumpy(nn.Module):
    """Leaves torch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x))
        return self.b(torch.from_numpy(x.detach().numpy()[..., ::-1].copy()))


class Remat(nn.Module):
    """Computes its activations again in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.b, self.c = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(self.a, x, use_reentrant=False)
        return self.c(checkpoint(self.b, x, use_reentrant=False))


class Wrapper(nn.Module):
    """Passes on what it is asked, as wrappers for distributed training do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Wrapped(nn.Module):
    """Reads an attribute through a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Wrapper(nn.Conv2d(3, 16, 3))
        self.blocks = nn.ModuleList(
            Wrapper(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3)), self.stem.out_channels


class Experts(nn.Module):
    """Sends each token to two of four networks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(32, 4), nn.Linear(32, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        share, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                y.index_add_(0, rows, expert(flat[rows]) * share[rows, places, None])
        return self.last(y.view_as(x) + x)


class Spectrum(nn.Module):
    """Filters in the frequency domain, by a parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3)
        self.w = nn.Parameter(torch.randn(16, 16, 9, 2) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x))
        y = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.w)
        return self.c(x + torch.fft.irfft2(y, s=x.shape[-2:], norm="ortho"))


class ByKeyword(nn.Module):
    """Attention by einsum, and a mask that can be given by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False)
        self.o, self.n = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, Any]:
        b, t, _ = x.shape
        y = self.n(x)
        q = self.q(y).reshape(b, t, 4, 8)
        k, v = (z.reshape(b, t, 4, 8) for z in self.kv(y).chunk(2, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return {"hidden": x + self.o(mixed.reshape(b, t, 32)), "nothing": None}


def _masked_tokens(batch: int, size: int) -> Inputs:
    steps = _STEPS[size]
    mask = torch.rand(batch, steps) > 0.2
    mask[:, 0] = True
    return {"x": torch.randn(batch, steps, 32), "mask": mask}


UNUSUAL_CODE: tuple[Animal, ...] = (
    Animal(
        "dataclass_input",
        OfScenes,
        lambda b, s: (
            Scene(torch.randn(b, 3, _SIDES[s], _SIDES[s]), torch.rand(b, 1, 1, 1) + 0.5),
        ),
    ),
    Animal("scripted_inside", scripted_inside, _images),
    Animal("sparse_neighbours", SparseGraph, _sparse),
    Animal("sparse_buffers", FixedGraph, lambda batch, size: (torch.randn(12, 16),)),
    Animal("bfloat16_inside", lambda: OtherPrecision(torch.bfloat16), _images),
    Animal("double_layer_inside", lambda: OtherPrecision(torch.float64), _images),
    Animal("gradient_inside", Energy, _rows, sizes=(1,)),
    Animal(
        "loss_with_labels",
        WithLoss,
        lambda b, s: {"x": _rows(b, s)[0], "labels": torch.randint(0, 4, (b,))},  # type: ignore[index]
        sizes=(1,),
    ),
    Animal("yolo_decode", Decodes, _images),
    Animal("constants_made_inside", MakesConstants, _images),
    Animal("vmap_ensemble", Ensemble, _rows, sizes=(1,)),
    Animal("through_numpy", ThroughNumpy, _images),
    Animal("checkpointed", Remat, _images),
    Animal("wrapped", lambda: Wrapper(Wrapped()), _images),
    Animal("experts", Experts, lambda b, s: (torch.randn(b, _STEPS[s], 32),), bound=15.0),
    Animal("global_filter", Spectrum, lambda b, _: (torch.randn(b, 3, 16, 16),), sizes=(1,)),
    Animal("mask_by_keyword", ByKeyword, _masked_tokens),
)
