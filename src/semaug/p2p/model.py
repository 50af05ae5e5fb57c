"""P2P-Net: a backbone, a classifier on each of its last stages and on all of them, and the parts of the image."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.network import Composite
from semaug.p2p.alignment import PartAlignment, reordered
from semaug.p2p.losses import alignment_loss, confident_cross_entropy, part_losses, ranking_loss
from semaug.p2p.proposals import ProposalNet, anchors, crop_parts, select_parts
from semaug.p2p.stages import Stages


class P2POutputs(NamedTuple):
    """Outputs for N images, P parts by falling score, S stages, C classes and stage features of F dimensions."""

    stage_logits: Tensor  # (S, N, C)
    logits: Tensor  # (N, C) of the concatenated features; in a view, the head's input
    part_stage_logits: Tensor  # (S, N, P, C)
    part_logits: Tensor  # (N, P, C)
    stage_features: Tensor  # (S, N, F)
    part_features: Tensor  # (S, N, P, F)
    predictions: Tensor  # (S, N, F) of the stage features from the parts in canonical order
    scores: Tensor  # (N, P)
    boxes: Tensor  # (N, P, 4) in the padded image
    order: Tensor  # (N, P): part i in canonical order is number order[:, i]


class _SharedLinear(nn.Module):
    """A second module with the parameters of a linear layer, which remains when a view replaces that layer.

    The parameters are the same objects. They are in the state dict once, under the layer's own name.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)

    def _save_to_state_dict(self, *args: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class P2PNet(nn.Module):
    """P2P-Net on a backbone with stages of falling resolution.

    The backbone becomes a part of the model and loses its own classifier. In eval mode the model returns the sum of the
    image's four logits (N, C); in training mode, :class:`P2POutputs`. A forward pass changes BatchNorm's buffers only:
    call :meth:`update_templates` once per step. Layers are as wide as in the paper if the backbone has 512 channels or
    more; otherwise the backbone's width replaces 512. (BatchNorm's momentum is torch's default, a tenth, not a
    hundredth as in the released code, so that the statistics are usable after a short training.)

    Args:
        backbone: A convolutional network of timm or torchvision, or any other sequence of modules.
        num_classes: Number of classes C, at least 2.

    Raises:
        ValueError: The backbone has too few stages, or there are fewer than two classes.

    >>> from semaug.network.models import SmallNet
    >>> model = P2PNet(SmallNet(5), num_classes=5)
    >>> model(torch.randn(2, 3, 64, 64)).part_logits.shape
    torch.Size([2, 4, 5])
    >>> model.eval()(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 5])
    """

    parts = 4
    confidences = (0.7, 0.8, 0.9)  # of the targets, stage by stage; 1 for the concatenation
    alignment_weight = 0.1

    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, not {num_classes}")
        stages = len(self.confidences)
        self.stages = Stages(backbone, stages)
        self.num_classes, channels = num_classes, self.stages.channels
        hidden, dimensions = min(512, channels[-1]), max(1, channels[-1] // 2)
        self.backbone = backbone
        self.conv_blocks = nn.ModuleList(_conv_block(inputs, hidden, dimensions) for inputs in channels)
        self.classifiers = nn.ModuleList(
            nn.Sequential(*_hidden_layer(dimensions, hidden), nn.Dropout(0.5), nn.Linear(hidden, num_classes))
            for _ in channels
        )
        self.proposals = ProposalNet(channels[-1])
        self.predictors = nn.ModuleList(
            nn.Sequential(nn.Linear(self.parts * dimensions, dimensions), nn.ELU(), nn.Linear(dimensions, dimensions))
            for _ in channels
        )
        self.alignment = PartAlignment(self.parts, dimensions)
        self.concatenated = nn.Sequential(*_hidden_layer(stages * dimensions, hidden))
        self.head = nn.Linear(hidden, num_classes)  # the last linear layer of the model
        self.part_head = _SharedLinear(self.head)

    def forward(self, images: Tensor) -> Tensor | P2POutputs:
        """Outputs of `images` (N, 3, height, width) in training mode; summed logits (N, C) in eval mode."""
        if self.training:
            return self.outputs(images)
        _, features, logits = self._image(images)
        return self._stage_logits(features).sum(0) + logits

    def head_logits(self, images: Tensor) -> Tensor:
        """The concatenated logits (N, C) of `images` alone, by the operators with which :meth:`outputs` begins."""
        return self._image(images)[2]

    def outputs(self, images: Tensor) -> P2POutputs:
        """The pass through `images` (N, 3, height, width) and their parts, in either mode."""
        maps, features, logits = self._image(images)
        scores, boxes = self._propose(maps[-1], (images.shape[2], images.shape[3]))
        crops = crop_parts(images, boxes, min(images.shape[2:]) // 2)
        part_features = self._features(self.stages.maps(self.backbone, crops.flatten(0, 1)))  # image by image

        def by_part(rows: Tensor) -> Tensor:
            return rows.view(*rows.shape[:-2], len(images), self.parts, rows.shape[-1])

        of_parts = by_part(torch.stack(part_features))
        order = self.alignment(of_parts[-1].detach())  # from the last stage's features, as in the released code
        return P2POutputs(
            stage_logits=self._stage_logits(features),
            logits=logits,
            part_stage_logits=by_part(self._stage_logits(part_features)),
            part_logits=by_part(self.part_head(self.concatenated(torch.cat(part_features, 1)))),
            stage_features=torch.stack(features),
            part_features=of_parts,
            predictions=torch.stack(
                [predict(f.flatten(1)) for predict, f in zip(self.predictors, reordered(of_parts, order), strict=True)]
            ),
            scores=scores,
            boxes=boxes,
            order=order,
        )

    def _propose(self, last_map: Tensor, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Scores (N, P) and boxes (N, P, 4) of the parts; no gradient reaches the map."""
        scores = self.proposals(last_map.detach())
        boxes = anchors(image_size, (last_map.shape[2], last_map.shape[3]), scores.device)
        selected = select_parts(scores.detach(), boxes, self.parts)
        return scores.gather(1, selected), boxes[selected]

    def _image(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        maps = self.stages.maps(self.backbone, images)
        features = self._features(maps)
        return maps, features, self.head(self.concatenated(torch.cat(features, 1)))

    def _features(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [block(stage).amax((2, 3)) for block, stage in zip(self.conv_blocks, maps, strict=True)]

    def _stage_logits(self, features: Sequence[Tensor]) -> Tensor:
        return torch.stack([classify(f) for classify, f in zip(self.classifiers, features, strict=True)])

    def rest_of_loss(self, outputs: P2POutputs, labels: Tensor) -> Tensor:
        """The loss without the cross-entropy of the concatenated logits: stages, parts, ranking and alignment.

        Args:
            outputs: Outputs of a pass.
            labels: Classes (N,), or probabilities (N, C).
        """
        of_parts = labels.repeat_interleave(self.parts, 0)
        total = confident_cross_entropy(outputs.part_logits.flatten(0, 1), of_parts)
        for stage, confidence in enumerate(self.confidences):
            part_logits = outputs.part_stage_logits[stage].flatten(0, 1)
            total = total + confident_cross_entropy(outputs.stage_logits[stage], labels, confidence)
            total = total + confident_cross_entropy(part_logits, of_parts, confidence)
        total = total + ranking_loss(outputs.scores, part_losses(outputs.part_logits, labels))
        return total + self.alignment_weight * alignment_loss(outputs.stage_features, outputs.predictions)

    def loss(self, outputs: P2POutputs, labels: Tensor) -> Tensor:
        """The whole loss; the arguments are those of :meth:`rest_of_loss`."""
        return self.rest_of_loss(outputs, labels) + confident_cross_entropy(outputs.logits, labels)

    def update_templates(self, outputs: P2POutputs) -> None:
        """Update the templates of the parts from a pass's `outputs`, once per training step."""
        self.alignment.update(outputs.part_features[-1], outputs.order)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Groups for the optimiser: the new layers with learning rate `lr`, the backbone with a tenth of it."""
        backbone = [parameter for parameter in self.backbone.parameters() if parameter.requires_grad]
        known = set(self.backbone.parameters())
        new = [parameter for parameter in self.parameters() if parameter not in known and parameter.requires_grad]
        return [{"params": new, "lr": lr}, {"params": backbone, "lr": lr / 10}]


def composite() -> Composite:
    """P2P-Net in the meta loop: its concatenated classifier, the module "head", is augmented.

    >>> from semaug.network import Network
    >>> from semaug.network.models import SmallNet
    >>> Network(P2PNet(SmallNet(5), 5), head="head", composite=composite()).num_classes
    5
    """
    return Composite(
        run=lambda model, images: cast(P2PNet, model).outputs(images),
        logits=lambda outputs: cast(P2POutputs, outputs).logits,
        rest=lambda model, outputs, labels: cast(P2PNet, model).rest_of_loss(outputs, labels),
        run_head=lambda model, images: cast(P2PNet, model).head_logits(images),
        after=lambda model, outputs: cast(P2PNet, model).update_templates(outputs),
    )


def _conv_block(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU()]
    layers += [nn.Conv2d(hidden, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ELU()]
