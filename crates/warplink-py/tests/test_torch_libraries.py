"""Libraries that train run unchanged on the backend, on CPU tensors, and end with the losses and parameters that they have
on Gloo."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

#: Seconds for all runs together.
LIMIT = 600

STEPS = 6


def samples():
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))


def network():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def with_accelerate(backend, _):
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    # Accelerate makes groups of CPU tensors by MPI and Gloo alone, but takes one that is there.
    torch.distributed.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    model = network()
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), loader)
    losses = []
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()[None]).tolist()
    said = broadcast_object_list([f"rank {accelerator.process_index}"])
    assert said == ["rank 0"]
    accelerator.wait_for_everyone()
    return losses, model


def with_transformers(backend, folder):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    # As with Accelerate, which the Trainer makes the group by.
    torch.distributed.init_process_group(backend)
    torch.manual_seed(3)
    rows = torch.randint(64, (48, 16))
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64))
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    assert arguments.world_size == 2
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]], model


def with_lightning(backend, folder):
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()
            self.losses = []

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_):
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def validation_step(self, batch, _):
            self.log("validation", self.network(batch[0]).sum(), sync_dist=True)

        def on_validation_end(self):
            self.losses.append(float(self.trainer.callback_metrics["validation"]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_steps=STEPS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(samples(), batch_size=8))
    assert trainer.world_size == 2
    return module.losses, module


LIBRARIES = {"accelerate": with_accelerate, "transformers": with_transformers, "lightning": with_lightning}


def rank_main(library, backend, folder):
    """What a rank of a run has in the end."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    losses, model = LIBRARIES[library](backend, folder)
    found = {
        "backend": dist.get_backend(),
        "losses": losses,
        "parameters": [float(each.detach().double().sum()) for each in model.parameters()],
    }
    dist.destroy_process_group()
    return found


def main(folder, libraries):
    """Runs every library on two ranks with each backend. Ranks are new processes: the launcher has threads, and a fork of it
    may find locks held for ever."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for library in libraries:
        for backend in ("gloo", "warplink"):
            place = f"{folder}/{library}.{backend}"
            config = LaunchConfig(
                1, 1, 2, run_id=library, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="spawn"
            )
            found = elastic_launch(config, rank_main)(library, backend, place)
            with open(f"{place}.json", "w") as file:
                json.dump([found[rank] for rank in range(2)], file)


def is_installed(library):
    needed = {"transformers": ("transformers", "accelerate")}.get(library, (library,))
    return all(importlib.util.find_spec(package) for package in needed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the results of all runs, and their output."""
    folder = tmp_path_factory.mktemp("libraries")
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), *filter(is_installed, LIBRARIES)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return folder, output


def marked(library):
    reason = f"{library}, or what it needs to train, is not installed"
    return pytest.param(library, marks=pytest.mark.skipif(not is_installed(library), reason=reason))


@pytest.mark.parametrize("library", [marked(library) for library in LIBRARIES])
def test_a_library_trains_as_on_gloo(runs, library):
    folder, output = runs
    found = {}
    for backend in ("gloo", "warplink"):
        file = folder / f"{library}.{backend}.json"
        assert file.exists(), output[-5000:]
        found[backend] = json.loads(file.read_text())
        assert {rank.pop("backend") for rank in found[backend]} == {backend}
    assert len(found["gloo"][0]["losses"]) >= STEPS
    # Of two ranks, sums do not depend on an order.
    assert found["warplink"] == found["gloo"], output[-2000:]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
