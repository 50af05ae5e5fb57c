"""P2P-Net as a whole: outputs, loss, gradients, buffers, head and backbones."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from semaug.data.birds import Birds
from semaug.network.blocks import find_head
from semaug.network.models import SmallNet, build_model
from semaug.network.views import View
from semaug.p2p import P2PNet, P2POutputs
from semaug.p2p.losses import alignment_loss, confident_cross_entropy, ranking_loss
from semaug.p2p.proposals import anchors, crop_parts

CLASSES = 5


def make(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return P2PNet(SmallNet(CLASSES, width=8), CLASSES).to(dtype)


def batch(count=3, side=64, dtype=torch.float64):
    return torch.randn(count, 3, side, side, dtype=dtype), torch.randint(CLASSES, (count,))


def without_dropout(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


# Outputs


def test_outputs_have_the_documented_shapes():
    model = make().train()
    images, _ = batch()
    outputs = model(images)
    assert isinstance(outputs, P2POutputs)
    assert {name: tuple(value.shape) for name, value in outputs._asdict().items()} == {
        "stage_logits": (3, 3, 5),
        "logits": (3, 5),
        "part_stage_logits": (3, 3, 4, 5),
        "part_logits": (3, 4, 5),
        "stage_features": (3, 3, 16),
        "part_features": (3, 3, 4, 16),
        "predictions": (3, 3, 16),
        "scores": (3, 4),
        "boxes": (3, 4, 4),
        "order": (3, 4),
    }
    assert (outputs.scores[:, :-1] >= outputs.scores[:, 1:]).all()
    known = {tuple(box) for box in anchors((64, 64), (8, 8)).tolist()}
    assert all(tuple(box) in known for box in outputs.boxes.flatten(0, 1).tolist())


def test_eval_mode_returns_the_sum_of_the_images_four_logits():
    model = make()
    model(batch()[0])  # some running statistics
    model.eval()
    images, _ = batch()
    outputs = model.outputs(images)
    torch.testing.assert_close(model(images), outputs.stage_logits.sum(0) + outputs.logits)
    torch.testing.assert_close(model.head_logits(images), outputs.logits)


def test_images_do_not_influence_each_other_in_eval_mode():
    """The batch gives the same as one image and one part at a time."""
    model = make()
    outputs = model(batch(4)[0])
    model.update_templates(outputs)
    model.eval()
    images, _ = batch()
    outputs = model.outputs(images)
    for n in range(3):
        alone = model.outputs(images[n : n + 1])
        for name, dim in (("logits", 0), ("stage_logits", 1), ("part_logits", 0), ("part_stage_logits", 1)):
            torch.testing.assert_close(getattr(alone, name), getattr(outputs, name).narrow(dim, n, 1))
        ordered = []
        for p in range(4):
            crop = crop_parts(images[n : n + 1], outputs.boxes[n : n + 1, p : p + 1], 32)[:, 0]
            torch.testing.assert_close(model.head_logits(crop)[0], outputs.part_logits[n, p])
            ordered.append(outputs.part_features[:, n, outputs.order[n, p]])
        for stage, predict in enumerate(model.predictors):
            expected = predict(torch.cat([part[stage] for part in ordered])[None])[0]
            torch.testing.assert_close(outputs.predictions[stage, n], expected)


def test_four_parts_of_half_the_side_go_through_the_backbone():
    model = make().train()
    seen = []
    model.backbone.stem.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    outputs = model(batch(2)[0])
    assert seen == [(2, 3, 64, 64), (8, 3, 32, 32)]
    assert outputs.scores.shape == (2, 4)
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        P2PNet(SmallNet(5), 1)


# The loss


def test_the_loss_is_the_sum_of_its_parts():
    model = make().train()
    images, labels = batch()
    out = model(images)
    of_parts = torch.tensor([label for label in labels for _ in range(4)])
    expected = confident_cross_entropy(out.logits, labels, 1.0)
    rest = confident_cross_entropy(out.part_logits.reshape(12, 5), of_parts, 1.0)
    for stage, confidence in enumerate((0.7, 0.8, 0.9)):
        rest = rest + confident_cross_entropy(out.stage_logits[stage], labels, confidence)
        rest = rest + confident_cross_entropy(out.part_stage_logits[stage].reshape(12, 5), of_parts, confidence)
        rest = rest + 0.1 * alignment_loss(out.stage_features[stage], out.predictions[stage])
    each = F.cross_entropy(out.part_logits.reshape(12, 5), of_parts, reduction="none").view(3, 4)
    rest = rest + ranking_loss(out.scores, each)
    torch.testing.assert_close(model.rest_of_loss(out, labels), rest)
    torch.testing.assert_close(model.loss(out, labels), rest + expected)


# Gradients


def test_gradients_are_finite_and_reach_every_parameter():
    model = make().train()
    model.update_templates(model(batch()[0]))
    images, labels = batch()
    model.loss(model(images), labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a level of the proposal network learns when it has a part; a bias before BatchNorm has no effect
        assert parameter.grad.abs().sum() > 0 or name.startswith("proposals.") or name.endswith("bias"), name
    assert sum(p.grad.abs().sum() for p in model.proposals.parameters()) > 0


def test_scores_give_a_gradient_to_the_proposal_network_only():
    model = make().train()
    model(batch()[0]).scores.sum().backward()
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {"proposals"}


def test_no_gradient_goes_through_the_crops():
    model = make().train()
    images, _ = batch()
    images.requires_grad_(True)
    outputs = model(images)
    for name in ("part_logits", "part_stage_logits", "predictions", "scores"):
        (gradient,) = torch.autograd.grad(getattr(outputs, name).sum(), images, allow_unused=True, retain_graph=True)
        assert gradient is None, name
    (gradient,) = torch.autograd.grad(outputs.logits.square().sum(), images)
    assert gradient.abs().sum() > 0


def test_forward_derivative_equals_backward_and_finite_differences():
    """The meta loop differentiates the loss along a direction; parts and order are constants there."""
    model = without_dropout(make())
    model.update_templates(model(batch(8)[0]))
    images, labels = batch(8)
    parameters = dict(model.named_parameters())
    directions = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(values):
        values = {f"model.{name}": value for name, value in values.items()}
        return torch.func.functional_call(_Loss(model, labels), values, (images,))

    gradients = torch.autograd.grad(loss(parameters), list(parameters.values()), create_graph=True)
    backward = sum((g * directions[name]).sum() for name, g in zip(parameters, gradients, strict=True))
    assert along(loss, parameters, directions) == pytest.approx(backward.item(), rel=1e-9)
    second = torch.autograd.grad(backward, list(parameters.values()), allow_unused=True)
    assert all(g.isfinite().all() for g in second if g is not None)

    # The scores depend on a detached map, so a change of the backbone changes the loss by more than its derivative.
    for name in directions:
        if name.startswith("backbone."):
            directions[name] = torch.zeros_like(directions[name])
    with torch.no_grad():  # a step so small that no input of a ReLU or maximum changes sides
        ahead, behind = (loss({n: p + by * directions[n] for n, p in parameters.items()}) for by in (1e-8, -1e-8))
    assert along(loss, parameters, directions) == pytest.approx((ahead - behind).item() / 2e-8, rel=1e-5)


def along(loss, parameters, directions):
    """The derivative in forward mode."""
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(p.detach(), directions[name]) for name, p in parameters.items()}
        return forward_ad.unpack_dual(loss(dual)).tangent.item()


class _Loss(nn.Module):
    def __init__(self, model, labels):
        super().__init__()
        self.model, self.labels = model, labels

    def forward(self, images):
        return self.model.loss(self.model(images), self.labels)


def test_order_and_losses_are_computed_in_fp32_inside_autocast():
    model = make(torch.float32).train()
    images, labels = batch(dtype=torch.float32)
    outputs = model(images)
    model.update_templates(outputs)
    half = P2POutputs(*(value.bfloat16() if value.is_floating_point() else value for value in outputs))
    wide = P2POutputs(*(value.float() if value.is_floating_point() else value for value in half))
    expected, order = model.loss(wide, labels), model.alignment(wide.part_features[-1])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.loss(half, labels), expected)
        assert torch.equal(model.alignment(half.part_features[-1]), order)
        model.update_templates(half)
    torch.testing.assert_close(model.loss(half, labels), expected)
    assert model.alignment.templates.dtype == torch.float32


# Buffers


def test_a_pass_changes_only_batchnorms_statistics():
    model = make().train()
    model.update_templates(model(batch()[0]))
    before = copy.deepcopy(model.state_dict())
    images, labels = batch()
    outputs = model(images)
    model.loss(outputs, labels).backward()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in moved)
    model.update_templates(outputs)
    assert not torch.equal(model.alignment.templates, before["alignment.templates"])


def test_without_running_statistics_a_pass_changes_no_buffer():
    model = make().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    before = copy.deepcopy(model.state_dict())
    images, labels = batch()
    model.loss(model(images), labels).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_are_ordered_by_score_first_and_by_templates_later():
    model = without_dropout(make())
    images, _ = batch(6)
    outputs = model(images)
    assert outputs.order.tolist() == [[0, 1, 2, 3]] * 6
    model.update_templates(outputs)
    expected = outputs.part_features[-1].detach().contiguous().sum(0) / len(images)
    assert torch.equal(model.alignment.templates, expected)
    assert torch.equal(model(images).order, model.alignment(outputs.part_features[-1].detach()))


# Its head, for the meta loop


def test_the_head_is_the_last_linear_layer_and_is_saved_once():
    model = make()
    assert find_head(model) == ("head", model.head)
    assert [name for name in model.state_dict() if "head" in name] == ["head.weight", "head.bias"]
    assert {"head.weight", "head.bias"} <= {name for name, _ in model.named_parameters()}
    other = make(seed=1)
    assert not other.load_state_dict(model.state_dict()).missing_keys
    for twin in (other, copy.deepcopy(model), copy.deepcopy(model).float()):
        assert twin.part_head.weight is twin.head.weight
        assert torch.equal(twin.part_head.weight.double(), model.head.weight)


def test_a_view_returns_the_heads_input_for_the_image_but_logits_for_the_parts():
    model = without_dropout(make())
    images, labels = batch()
    whole = model(images)
    view = View(model, "head", set(), tracks=False)
    outputs = view.root(images)
    torch.testing.assert_close(model.head(outputs.logits), whole.logits)
    torch.testing.assert_close(outputs.part_logits, whole.part_logits)
    torch.testing.assert_close(view.root.rest_of_loss(outputs, labels), model.rest_of_loss(whole, labels))
    with view.at({"head.weight": torch.zeros_like(model.head.weight), "head.bias": torch.ones(CLASSES).double()}):
        assert torch.equal(view.root(images).part_logits, torch.ones(3, 4, CLASSES).double())


def test_the_backbones_learning_rate_is_a_tenth():
    model = make()
    new, old = model.parameter_groups(0.02)
    assert (new["lr"], old["lr"]) == (0.02, 0.002)
    assert set(old["params"]) == set(model.backbone.parameters())
    assert {*new["params"], *old["params"]} == set(model.parameters())
    assert len(new["params"]) == len(set(new["params"]))


# Backbones


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("small", [32, 64, 64]),
        ("resnet18", [128, 256, 512]),
        ("torchvision/resnet18", [128, 256, 512]),
        ("resnet50", [512, 1024, 2048]),
        ("torchvision/resnet50", [512, 1024, 2048]),
        ("mobilenetv2_100", [32, 96, 320]),
        ("efficientnet_b0", [40, 112, 320]),
        ("convnext_atto", [80, 160, 320]),
        ("torchvision/densenet121", [256, 512, 1024]),
        ("torchvision/vgg11_bn", [512, 512, 512]),
    ],
)
def test_any_backbone_with_stages_works(name, channels):
    model = P2PNet(build_model(name, CLASSES, 64), CLASSES)
    assert model.stages.channels == channels
    assert all(module.training for module in model.modules())
    images, labels = batch(2, 64, torch.float32)
    model.loss(model(images), labels).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.eval()(images).shape == (2, CLASSES)


def test_stages_of_timm_and_torchvision_are_the_same_maps():
    ours, theirs = build_model("resnet18", 5, 64), build_model("torchvision/resnet18", 5, 64)
    theirs.load_state_dict(ours.state_dict())
    images, _ = batch(2, 64, torch.float32)
    one, other = P2PNet(ours, 5).eval(), P2PNet(theirs, 5).eval()
    for a, b in zip(one.stages.maps(one.backbone, images), other.stages.maps(other.backbone, images), strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_uses_its_own_layers():
    model = make().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.zero_()
    images, _ = batch()
    assert not torch.allclose(twin(images), model(images))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "torchvision/vit_b_16", "torchvision/swin_t"])
def test_a_network_without_stages_is_refused_and_left_as_it_was(name):
    backbone = build_model(name, CLASSES, 128)
    head = find_head(backbone)
    with pytest.raises(ValueError, match="has no 3 stages of falling resolution"):
        P2PNet(backbone, CLASSES)
    assert find_head(backbone) == head
    assert all(module.training for module in backbone.modules())


# Training


def test_a_few_steps_on_drawn_birds_lower_the_loss():
    birds = Birds(num_species=CLASSES, per_species=4, size=64)
    images = torch.stack([birds[i][0] for i in range(len(birds))]).float() / 127.5 - 1
    labels = torch.tensor(birds.labels)
    model = make(torch.float32).train()
    optimizer = torch.optim.SGD(model.parameter_groups(0.02), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(12):
        outputs = model(images)
        loss = model.loss(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_templates(outputs)
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert int(model.alignment.seen) == 12 * 20
