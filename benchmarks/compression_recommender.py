"""Dynamic communication thresholding on the kind of model that it was published for: embeddings and a wide MLP.

    JPIPE_DATA=FOLDER python benchmarks/compression_recommender.py
    JPIPE_DATA=FOLDER python benchmarks/compression_recommender.py --settings plain "gradients 0.5 %" --steps 300

The data are real text as a recommender sees it: four words are the history, the fifth is the item, and the label says
whether the item follows the history, or was drawn from all words. The model has the form of DLRM (Naumov et al., 2019)
and its optimizer, SGD. A table of embeddings is a stage on one device, and a wide MLP is the next stage, with a copy on
each of two devices: embeddings are split from the rest of the model, and the MLP has data parallelism, as in the paper
(Gupta et al., 2021). *Gradients* are those that the copies of the MLP exchange, *messages* what goes from one stage
to the other and back: embeddings, or the first hidden layer of the MLP, where that is on the first stage too. A setting
is named after the share of the entries that it has room to send.

Each setting has its own learning rate, which falls to 0 linearly: the one of `--rates` with the least loss on
validation data, with the first seed. The table has the loss and the area under the ROC curve on test data, mean and
standard deviation over the seeds.

The runs are loops on one device which compute what the pipeline computes; `--check` compares the two.
"""

import argparse
import collections
import functools
import gzip
import json
import os
import pathlib
import re
import statistics
import sys
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
HISTORY, ROWS, MICROBATCHES = 4, 128, 2


def threshold(share: float, room: float = 1) -> str:
    """A threshold with room for a share of the entries.

    With error feedback more and more entries pass. A threshold that aims at a third of the room (`room=3`) is computed
    anew less often.
    """
    return f"threshold:density={share / room:.5f},room={room:g},every=1000"


EMBEDDINGS, HIDDEN = 1, 3
"""The layers before the cut: the message is the embeddings of the words, or the first hidden layer."""

SETTINGS = {
    "plain": (EMBEDDINGS, {}),
    **{
        f"gradients {name}": (EMBEDDINGS, {"compress_gradients": threshold(share, room=3)})
        for name, share in {"10 %": 0.1, "2.5 %": 0.025, "0.5 %": 0.005, "0.2 %": 0.002}.items()
    },
    **{
        f"messages of {what} {name}": (cut, {"compress_messages": threshold(share)})
        for what, cut in {"embeddings": EMBEDDINGS, "a hidden layer": HIDDEN}.items()
        for name, share in {"10 %": 0.1, "2.5 %": 0.025}.items()
    },
    "gradients 0.5 %, messages of a hidden layer 2.5 %": (
        HIDDEN,
        {"compress_gradients": threshold(0.005, room=3), "compress_messages": threshold(0.025)},
    ),
}
"""Name -> the cut, and the compressors as texts."""


class Words:
    """Histories with items and labels, from the words of a text."""

    def __init__(self, folder: pathlib.Path, num_words: int):
        import numpy as np

        texts = {part: self._read(folder / "text" / f"sotu_{part}.txt.gz") for part in ("train", "valid", "test")}
        common = collections.Counter(texts["train"]).most_common(num_words - 1)
        number = {word: i + 1 for i, (word, _) in enumerate(common)}  # 0: all others
        self.texts = {part: np.array([number.get(w, 0) for w in words], np.int32) for part, words in texts.items()}

    @staticmethod
    def _read(path: pathlib.Path) -> list[str]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return re.findall(r"[a-z']+|[.,;]", file.read().lower())

    def rows(self, part: str, count: int, rng) -> dict:
        """As many rows of a part, half of them with the word that follows."""
        import numpy as np

        text = self.texts[part]
        starts = rng.integers(0, len(text) - HISTORY, count)
        rows = text[starts[:, None] + np.arange(HISTORY + 1)]
        labels = rng.integers(0, 2, count).astype(np.float32)
        other = self.texts["train"][rng.integers(0, len(self.texts["train"]), count)]
        rows[:, -1] = np.where(labels == 1, rows[:, -1], other)
        return {"inputs": rows, "labels": labels}


def interact(x):
    """The vectors of the words, one after the other, and the product of each pair: DLRM's interaction."""
    import jax.numpy as jnp
    import numpy as np

    pairs = np.tril_indices(x.shape[1], -1)
    products = jnp.einsum("bfd,bgd->bfg", x, x)[:, pairs[0], pairs[1]]
    return jnp.concatenate([x.reshape(len(x), -1), products], axis=1)


def layers(num_words: int, dim: int, width: int) -> list:
    """DLRM: embeddings, the products of all pairs of them, and an MLP of three layers."""
    import jax
    from flax import nnx

    import jpipe

    class Embeddings(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(num_words, dim, rngs=rngs)

        def __call__(self, words):  # [B, HISTORY + 1] -> [B, HISTORY + 1, dim]
            return self.embed(words)

    class Hidden(nnx.Module):
        def __init__(self, wide, rngs):
            self.linear = nnx.Linear(wide, width, rngs=rngs)

        def __call__(self, x):
            return jax.nn.relu(self.linear(x))

    class Logit(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(width, 1, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)[:, 0]

    features = HISTORY + 1
    wides = features * dim + features * (features - 1) // 2, width
    return [Embeddings, jpipe.Function(interact), *[functools.partial(Hidden, wide) for wide in wides], Logit]


def area_under_curve(logits, labels) -> float:
    """The share of pairs of a true and a false item in which the true one has the larger logit."""
    import numpy as np

    rank = np.empty(len(logits))
    rank[np.argsort(logits, kind="stable")] = np.arange(1, len(logits) + 1)
    true = labels == 1
    return float((rank[true].sum() - true.sum() * (true.sum() + 1) / 2) / (true.sum() * (~true).sum()))


class Run:
    """One setting: a compiled loop, which all rates and seeds use.

    The loop has the copies one after the other, each with its compressor. It is what `pipeline` computes, which sends
    between devices: `difference` compares them.

    Args:
      words: the data.
      setting: a key of `SETTINGS`.
      args: options of the command line.
    """

    def __init__(self, words: Words, setting: str, args: argparse.Namespace):
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import jpipe

        self.words, self.args, self.setting = words, args, setting
        mean_loss = lambda logits, batch: jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["labels"]))  # noqa: E731
        self._cut, texts = SETTINGS[setting]
        compressors = {name: jpipe.compress.parse(text) for name, text in texts.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # few microbatches
            schedule = jpipe.schedules.one_f_one_b(2, MICROBATCHES, "paired", replicas=(1, MICROBATCHES))
        self.pipe = jpipe.Pipeline(
            layers(args.words, args.dim, args.width),
            loss=mean_loss,
            optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
            schedule=schedule,
            boundaries=[self._cut],
            **compressors,
        )
        rng = np.random.default_rng(1)
        self.held_out = {part: words.rows(part, 8192, rng) for part in ("valid", "test")}
        self.first = {n: jax.ShapeDtypeStruct((ROWS, *a.shape[1:]), a.dtype) for n, a in self.held_out["test"].items()}
        self._message = compressors.get("compress_messages")
        gradients = compressors.get("compress_gradients")
        self._transform = optax.identity() if gradients is None else jpipe.compress.compress_gradients(gradients)
        self._loop = jax.jit(self._trained)
        self._logits = jax.jit(lambda params, words, state: self._forward(params, words, state)[0])

    def _forward(self, params: list, words, state) -> tuple:
        """Logits, and the state of the compressor of messages."""
        import jax
        import jax.numpy as jnp

        x = params[0]["embed"]["embedding"][words]
        for number, layer in enumerate(params[1:], start=1):
            if number == self._cut and self._message is not None:
                wire, state = self._message.encode(jax.lax.stop_gradient(x), state)
                x = jnp.where(self._message.decode(wire, x) != 0, x, 0)
            if "linear" not in layer:
                x = interact(x)
                continue
            x = x @ layer["linear"]["kernel"] + layer["linear"]["bias"][None]
            x = x[:, 0] if number == len(params) - 1 else jax.nn.relu(x)
        return x, state

    def _trained(self, params: list, rows: dict, rates) -> tuple:
        """The weights after all steps of `rows`, each `[steps, copies, microbatch, ...]`, and the losses.

        `rates` has the learning rate of each step.
        """
        import jax
        import jax.numpy as jnp
        import optax

        def loss(params, words, labels, state):
            logits, state = self._forward(params, words, state)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), state

        def step(carry, batch_and_rate):
            (params, states, message), (batch, rate) = carry, batch_and_rate
            gradients, losses, states = [], [], list(states)
            for copy in range(MICROBATCHES):
                given = params, batch["inputs"][copy], batch["labels"][copy], message
                (value, message), gradient = jax.value_and_grad(loss, has_aux=True)(*given)
                sent, states[copy] = self._transform.update(gradient[self._cut :], states[copy])
                gradients.append([*gradient[: self._cut], *sent])
                losses.append(value)
            moved = jax.tree.map(lambda p, *g: p - rate * sum(g) / MICROBATCHES, params, *gradients)
            return (moved, tuple(states), message), sum(losses) / MICROBATCHES

        states = (self._transform.init(params[self._cut :]),) * MICROBATCHES
        message = None
        if self._message is not None:
            message = self._message.init(jnp.zeros(()))
        (params, _, message), losses = jax.lax.scan(step, (params, states, message), (rows, rates))
        return params, message, losses

    def ratios(self) -> dict[str, float]:
        """Kind of message -> how many times fewer bytes are sent."""
        return {record.what: record.ratio for record in self.pipe.messages(self.first)}

    def rows(self, seed: int, steps: int) -> dict:
        """The minibatches of a run: arrays `[steps, copies, microbatch, ...]`."""
        import numpy as np

        rows = self.words.rows("train", steps * ROWS, np.random.default_rng((2, seed)))
        shape = steps, MICROBATCHES, ROWS // MICROBATCHES
        return {name: a.reshape(*shape, *a.shape[1:]) for name, a in rows.items()}

    def weights(self, seed: int) -> list:
        """The first weights."""
        import jax

        return self.pipe.get_params(self.pipe.init(jax.random.key(seed), self.first))

    def train(self, rate: float, seed: int) -> dict:
        """The numbers of one run: losses and areas on held-out data, and the loss of the last steps."""
        import numpy as np
        import optax

        begun = time.perf_counter()
        steps = self.args.steps
        rates = np.linspace(rate, 0, steps, endpoint=False, dtype=np.float32)
        params, message, losses = self._loop(self.weights(seed), self.rows(seed, steps), rates)
        result = dict(setting=self.setting, rate=rate, seed=seed, train=float(np.mean(losses[-100:])))
        for part, rows in self.held_out.items():
            microbatches = rows["inputs"].reshape(-1, ROWS // MICROBATCHES, HISTORY + 1)
            logits = np.concatenate([self._logits(params, words, message) for words in microbatches])
            loss = float(np.mean(optax.sigmoid_binary_cross_entropy(logits, rows["labels"])))
            result |= {part: loss, f"{part}_area": area_under_curve(logits, rows["labels"])}
        return result | {"seconds": round(time.perf_counter() - begun, 1)}

    def difference(self, steps: int = 30, rate: float = 1.0) -> float:
        """The largest difference between weights of the loop and of the pipeline, over the largest weight."""
        import jax
        import numpy as np

        rows, params = self.rows(0, steps), self.weights(0)
        state = self.pipe.init(jax.random.key(0), self.first, params=params)
        state = self.pipe.with_hyperparams(state, learning_rate=rate)
        for i in range(steps):
            state, _ = self.pipe.step(state, {name: a[i].reshape(ROWS, *a.shape[3:]) for name, a in rows.items()})
        params, _, _ = self._loop(params, rows, np.full(steps, rate, np.float32))
        pairs = zip(*map(jax.tree.leaves, (params, self.pipe.get_params(state))), strict=True)
        return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def table(runs: list[dict]) -> str:
    """One row for each setting: the runs at its best rate."""
    lines = ["| setting | bytes / | rate | test loss | area under curve, % |", "|---|---|---|---|---|"]
    for setting in dict.fromkeys(run["setting"] for run in runs):
        of = [run for run in runs if run["setting"] == setting and run["chosen"]]
        spread = [
            f"{statistics.mean(v):.{d}f} ± {statistics.stdev(v) if len(v) > 1 else 0:.{d}f}"
            for v, d in (([r["test"] for r in of], 4), ([100 * r["test_area"] for r in of], 2))
        ]
        lines.append(f"| {setting} | {of[0]['ratio']} | {of[0]['rate']:g} | {' | '.join(spread)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--words", type=int, default=500, help="rows of the table of embeddings")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--check", action="store_true", help="compare with 30 steps of the pipeline")
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("JPIPE_DATA"))
    args = parser.parse_args()
    if args.data is None or not (args.data / "text").is_dir():
        parser.error("set JPIPE_DATA, or --data, to a folder with text/sotu_train.txt.gz in it.")
    import jax

    jax.config.update("jax_num_cpu_devices", 1 + MICROBATCHES)
    words, runs = Words(args.data, args.words), []
    for setting in args.settings:
        run = Run(words, setting, args)
        if args.check:
            print(f"{setting}: the loop is the pipeline up to {run.difference():.1e} of the largest weight", flush=True)
        ratios = [f"{ratio:.1f}" for kind, ratio in run.ratios().items() if ratio > 1.01 and kind != "gradient"]
        ratio = ", ".join(ratios) or "1.0"

        def trained(rate: float, seed: int, run: Run = run, ratio: str = ratio) -> dict:
            one = run.train(rate, seed) | {"ratio": ratio, "chosen": seed > 0}
            print(json.dumps(one), flush=True)
            return one

        searched = [trained(rate, 0) for rate in args.rates]
        best = min(searched, key=lambda one: one["valid"])
        best["chosen"] = True
        runs += [*searched, *(trained(best["rate"], seed) for seed in range(1, args.seeds))]
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
