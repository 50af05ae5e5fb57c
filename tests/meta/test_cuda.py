"""What only a GPU can show: masks replayed from its own generator, mixed precision, no waiting for the host."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import rank_gpu
import semaug
from semaug.meta.problem import global_norm
from semaug.meta.streams import SideStream
from semaug.network.network import Network
from semaug.util.devices import stream_for
from several import in_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def learner(
    name: str, frozen: int, dtype: torch.dtype = torch.float32, drop: float = 0.2, **options: Any
) -> semaug.LearnableAugmentation:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, drop_rate=drop, drop_path_rate=drop).to("cuda", dtype)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    covnet = semaug.CovNet(Network(model).feature_dim).to("cuda", dtype)
    meta_optimizer = torch.optim.SGD(covnet.parameters(), lr=0.1)
    return semaug.LearnableAugmentation(
        model, optimizer, covnet, meta_optimizer, strength=3.0, frozen_blocks=frozen, **options
    )


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(8, 3, 64, 64, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    return images, torch.randint(7, (8,), device="cuda")


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_engines_agree_in_fp64_with_random_masks(name: str, order: str, frozen: int) -> None:
    states = []
    for engine in ("jvp", "double_backward"):
        one = learner(name, frozen, torch.float64, order=order, engine=engine)
        torch.manual_seed(1)
        for _ in range(2):
            one.step(*batch(torch.float64))
        states.append({**one.network.model.state_dict(), **one.source.state_dict()})
    torch.testing.assert_close(*states, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("order", ["paper", "pipelined"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_follows_fp32(order: str, dtype: torch.dtype) -> None:
    moves = []
    for autocast in (None, dtype):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if autocast == torch.float16 else None
        # Without dropout: a GPU draws its masks in another order for tensors of another precision.
        one = learner("resnet18", 4, drop=0.0, order=order, autocast=autocast, scaler=scaler)
        start = copy.deepcopy(list(one.source.parameters()))
        torch.manual_seed(1)
        for _ in range(2):
            metrics = one.step(*batch())
        assert all(value.isfinite() for value in metrics.values())
        moves.append(torch.cat([(b - a).flatten() for a, b in zip(start, one.source.parameters(), strict=True)]))
    assert torch.cosine_similarity(moves[0], moves[1], dim=0) > 0.95


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_a_step_does_not_wait_for_the_gpu(order: str) -> None:
    one = learner("resnet18", 4, order=order, check_values=False, autocast=torch.bfloat16)
    data = batch()
    for _ in range(2):
        one.step(*data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.step(*data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_transformers_with_fused_attention_agree_between_engines() -> None:
    states = []
    for engine in ("jvp", "double_backward"):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=7).cuda()
        one = semaug.LearnableAugmentation(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), engine=engine, strength=10.0, frozen_blocks=0
        )
        torch.manual_seed(1)
        images, labels = batch()
        one.step(images.contiguous(), labels)
        states.append([parameter.detach().clone() for parameter in one.source.parameters()])
    error = global_norm([a - b for a, b in zip(*states, strict=True)]) / global_norm(states[0])
    assert error < 1e-5


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_a_pass_with_dropout_is_replayed_as_it_was(name: str) -> None:
    """Attention's own dropout too, whose fused kernel draws masks that no other pass could repeat."""
    torch.manual_seed(0)
    options = {"img_size": 64, "attn_drop_rate": 0.3} if name.startswith("vit") else {"drop_path_rate": 0.3}
    network = Network(timm.create_model(name, num_classes=7, **options).cuda().train())
    images, _ = batch()
    with torch.no_grad():
        features, tape = network.forward(images.contiguous(), record=True)
        with sdpa_kernel(SDPBackend.MATH):  # as in every pass that is differentiated forward or twice
            again = network.replay({}, tape)
    torch.testing.assert_close(again, features, rtol=1e-4, atol=1e-5)


def _last_meta_gradient(name: str, order: str, engine: str = "jvp", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"img_size": 64} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=7, **options).to("cuda", dtype).to(memory_format=torch.channels_last)
    covnet = semaug.CovNet(Network(model).feature_dim).to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    still = torch.optim.SGD(covnet.parameters(), lr=0.0)
    one = semaug.LearnableAugmentation(
        model, optimizer, covnet, still, strength=3.0, frozen_blocks=0, order=order, engine=engine
    )
    torch.manual_seed(1)
    images, labels = batch(torch.float32)
    with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
        one.step(images.to(dtype), labels)
    return torch.cat([p.grad.double().flatten() for p in covnet.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_kernels_give_the_meta_gradient_of_fp64(name: str, order: str) -> None:
    """In fp32, channels-last, where the tangent pass runs in our kernels."""
    exact, ours = _last_meta_gradient(name, order, dtype=torch.float64), _last_meta_gradient(name, order)
    assert (exact - ours).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("order", ["paper", "pipelined"])
def test_kernels_give_the_meta_gradient_of_double_backward(order: str) -> None:
    """Untrained, MobileNetV2 turns a change of 1e-7 in its images into another gradient, so fp64 is no measure."""
    exact = _last_meta_gradient("mobilenetv2_100", order, "double_backward")
    assert (exact - _last_meta_gradient("mobilenetv2_100", order)).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("mode", rank_gpu.MODES)
def test_ranks_on_one_gpu_do_what_one_process_does(mode: str) -> None:
    """In fp64: NCCL's sums over one rank, and gloo's over two that share the GPU."""
    script = Path(rank_gpu.__file__)
    in_processes(rank_gpu.MODES[mode], script, mode, timeout=rank_gpu.SECONDS + 30)


def test_other_work_on_the_side_stream_does_not_overwrite_its_results() -> None:
    device = torch.device("cuda")
    side = SideStream(device)
    with side.fork():
        result = torch.full((1000,), 1.0, device=device)
    side.join(result)
    torch.cuda._sleep(100_000_000)  # the main stream is late
    read = result.clone()
    del result
    with torch.cuda.stream(stream_for("diagnostics", device)):
        others = [torch.full((1000,), 2.0, device=device) for _ in range(4)]
    assert bool((read == 1.0).all())
    assert all(bool((other == 2.0).all()) for other in others)
