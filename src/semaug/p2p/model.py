"""P2P-Net: a backbone, a classifier on each of its last stages and on all of them, and the parts of the image."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semaug.p2p.alignment import PartAlignment, reordered
from semaug.p2p.losses import alignment_loss, confident_cross_entropy, part_losses, ranking_loss
from semaug.p2p.proposals import ProposalNet, anchors, crop_parts, select_parts
from semaug.p2p.stages import Stages, drop_unused


class P2POutputs(NamedTuple):
    """All that the losses need, for N images, P parts, S stages, C classes and stage features of F dimensions.

    Parts come in the order of their scores; ``order`` tells the canonical one.
    """

    stage_logits: Tensor  # (S, N, C)
    logits: Tensor  # (N, C), of the concatenated features: the output of the head, or its input if it was replaced
    part_stage_logits: Tensor  # (S, N, P, C)
    part_logits: Tensor  # (N, P, C)
    stage_features: Tensor  # (S, N, F)
    part_features: Tensor  # (S, N, P, F)
    predictions: Tensor  # (S, N, F), of the stage features from the parts in canonical order
    scores: Tensor  # (N, P)
    boxes: Tensor  # (N, P, 4) in the padded image
    order: Tensor  # (N, P): the i-th part in canonical order is number order[:, i]


class SharedLinear(nn.Module):
    """A second call to a linear layer's parameters, which stays what it is when that layer is replaced in a view.

    It is no copy: the parameters are the same objects. They are in the state dict once, under the layer's own name.
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
    """P2P-Net on a backbone of timm or torchvision, or any other with stages of falling resolution.

    The backbone becomes a part of the model and loses its own classifier. In eval mode the model gives the sum of the
    image's four logits, (N, C); in training mode, :class:`P2POutputs`. A forward pass moves no buffer but BatchNorm's:
    call :meth:`update_templates` once per step. `part_size` is the side of the parts sent through the network, half
    the image's if not given. The layers are as wide as in the paper where the backbone has 512 channels or more;
    a narrower one's own width takes the place of 512. (Running statistics move by a tenth, torch's default, not by a
    hundredth as in the released code, so that short trainings have some to test with.)
    """

    confidences = (0.7, 0.8, 0.9)  # of the targets, stage by stage; 1 for the concatenation
    alignment_weight = 0.1

    def __init__(self, backbone: nn.Module, num_classes: int, *, parts: int = 4, part_size: int | None = None) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, not {num_classes}")
        stages = len(self.confidences)
        self.stages = Stages(backbone, stages)
        drop_unused(backbone, self.stages)
        self.num_classes, self.parts, self.part_size = num_classes, parts, part_size
        channels = self.stages.channels
        hidden, dimensions = min(512, channels[-1]), max(1, channels[-1] // 2)
        self.backbone = backbone
        self.conv_blocks = nn.ModuleList(_conv_block(inputs, hidden, dimensions) for inputs in channels)
        self.classifiers = nn.ModuleList(
            nn.Sequential(*_hidden_layer(dimensions, hidden), nn.Dropout(0.5), nn.Linear(hidden, num_classes))
            for _ in channels
        )
        self.proposals = ProposalNet(channels[-1])
        self.predictors = nn.ModuleList(
            nn.Sequential(nn.Linear(parts * dimensions, dimensions), nn.ELU(), nn.Linear(dimensions, dimensions))
            for _ in channels
        )
        self.alignment = PartAlignment(parts, dimensions)
        self.concatenated = nn.Sequential(*_hidden_layer(stages * dimensions, hidden))
        self.head = nn.Linear(hidden, num_classes)  # on the image; the last linear layer of the model
        self.part_head = SharedLinear(self.head)

    def forward(self, images: Tensor) -> Tensor | P2POutputs:
        if self.training:
            return self.outputs(images)
        _, features, logits = self._image(images)
        return self._stage_logits(features).sum(0) + logits

    def head_logits(self, images: Tensor) -> Tensor:
        """The image's concatenated logits alone; the operators are those with which :meth:`outputs` begins."""
        return self._image(images)[2]

    def outputs(self, images: Tensor) -> P2POutputs:
        """The pass through image and parts, in either mode."""
        maps, features, logits = self._image(images)
        scores, boxes = self.propose(maps[-1], (images.shape[2], images.shape[3]))
        crops = crop_parts(images, boxes, self.part_size or min(images.shape[2:]) // 2)
        part_features = self._features(self._maps(crops.flatten(0, 1)))  # image by image

        def by_part(rows: Tensor) -> Tensor:
            return rows.view(*rows.shape[:-2], len(images), self.parts, rows.shape[-1])

        of_parts = by_part(torch.stack(part_features))
        order = self.alignment(of_parts[-1].detach())  # by the last stage's features, as in the released code
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

    def propose(self, last_map: Tensor, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Scores (N, P) and boxes (N, P, 4) of the parts; no gradient reaches the map."""
        scores = self.proposals(last_map.detach())
        boxes = anchors(image_size, (last_map.shape[2], last_map.shape[3]), scores.device)
        chosen = select_parts(scores.detach(), boxes, self.parts)
        return scores.gather(1, chosen), boxes[chosen]

    def _image(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        maps = self._maps(images)
        features = self._features(maps)
        return maps, features, self.head(self.concatenated(torch.cat(features, 1)))

    def _maps(self, images: Tensor) -> list[Tensor]:
        return self.stages.maps(self.backbone, images)

    def _features(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [block(stage).amax((2, 3)) for block, stage in zip(self.conv_blocks, maps, strict=True)]

    def _stage_logits(self, features: Sequence[Tensor]) -> Tensor:
        return torch.stack([classify(f) for classify, f in zip(self.classifiers, features, strict=True)])

    def rest_of_loss(self, outputs: P2POutputs, labels: Tensor) -> Tensor:
        """The loss without the cross-entropy of the image's concatenated logits; it looks at the outputs alone.

        Cross-entropies of the stages and of the parts, the ranking loss of the proposals, and the alignment loss.
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
        """The whole loss of P2P-Net."""
        return self.rest_of_loss(outputs, labels) + confident_cross_entropy(outputs.logits, labels)

    def update_templates(self, outputs: P2POutputs) -> None:
        """Move the templates of the parts, once per training step."""
        self.alignment.update(outputs.part_features[-1], outputs.order)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """For the optimiser: the new layers at `lr`, the backbone at a tenth of it."""
        backbone = [parameter for parameter in self.backbone.parameters() if parameter.requires_grad]
        known = set(self.backbone.parameters())
        new = [parameter for parameter in self.parameters() if parameter not in known and parameter.requires_grad]
        return [{"params": new, "lr": lr}, {"params": backbone, "lr": lr / 10}]


def _conv_block(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """1×1 and 3×3 convolution, each with BatchNorm and ReLU; the maximum over places follows."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU()]
    layers += [nn.Conv2d(hidden, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ELU()]
