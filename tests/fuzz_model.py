"""The models and losses of `fuzz.py` in plain Flax and JAX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from fuzz_layers import KINDS, enter, leave, reports_to, squares, with_x, x_of

import jpipe


def cast(tree, dtype):
    """Real floating-point numbers in another dtype; None: as they are."""
    if dtype is None:
        return tree
    real = lambda a: jnp.issubdtype(jnp.result_type(a), jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: jnp.asarray(a, dtype) if real(a) else a, tree)


def is_role(variable, role):
    if isinstance(variable, nnx.Param):
        return role == "parameters"
    if isinstance(variable, nnx.RngState):
        return role == "random"
    return role == "state"


class NNXLayer:
    """A factory, called from values."""

    def __init__(self, make, key):
        self.make, self.key = make, key
        abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        self.graph, whole = nnx.split(abstract)
        self.flat = dict(nnx.to_flat_state(whole))

    def first(self):
        """Weights and state that the factory makes."""
        made = nnx.to_flat_state(nnx.state(self.make(rngs=nnx.Rngs(self.key))))
        return tuple(
            unflatten_dict({path: v[...] for path, v in made if is_role(v, role)}) for role in ("parameters", "state")
        )

    def __call__(self, parameters, state, key, a, training):
        values = {**flatten_dict(parameters), **flatten_dict(state)}
        streams = [p for p, v in self.flat.items() if isinstance(v, nnx.RngKey)]
        for n, path in enumerate(streams):
            values[path] = jax.random.fold_in(key, n)
        for path, v in self.flat.items():
            if isinstance(v, nnx.RngCount):
                values[path] = jnp.zeros(v.shape, v.dtype)
        variables = [(path, v.replace(values[path])) for path, v in self.flat.items()]
        module = nnx.merge(self.graph, nnx.from_flat_state(variables))
        if not training:
            module.eval()
        a = module(a)
        after = nnx.to_flat_state(nnx.state(module))
        new = {path: v[...] for path, v in after if is_role(v, "state")}
        return a, unflatten_dict(new)


class LinenLayer:
    def __init__(self, layer):
        self.module = layer.module if isinstance(layer, jpipe.Linen) else layer
        self.words = layer if isinstance(layer, jpipe.Linen) else None

    def __call__(self, parameters, state, key, a, training):
        words = {}
        if self.words is not None:
            words = self.words.train if training else self.words.evaluate
        a, after = self.module.apply({"params": parameters, **state}, a, mutable=list(state), **words)
        return a, {**state, **after}


def function_layer(apply):
    return lambda parameters, state, key, a, training: (apply(parameters, a), state)


def plain_layer(layer, key):
    if isinstance(layer, nn.Module | jpipe.Linen):
        return LinenLayer(layer)
    if isinstance(layer, type(KINDS["weighed"].layer)):
        return plain_layer(layer.layer, key)
    if isinstance(layer, jpipe.Function):
        return function_layer(lambda parameters, a: layer.function(a))
    if isinstance(layer, jpipe.InitApply):
        return function_layer(layer.apply)
    return NNXLayer(layer, key)


@jax.custom_vjp
def mixed_product(x, forward, backward):
    """`x @ forward`, whose gradient with respect to x reads other weights."""
    return x @ forward


mixed_product.defvjp(
    lambda x, forward, backward: (x @ forward, (x, backward)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g, jnp.zeros_like(kept[1])),
)


class Plain:
    """The model of a case.

    Attributes:
      names: of its layers.
      layers: `(parameters, state, key, a, training) -> (a, state)`.
    """

    def __init__(self, case, key):
        self.case, self.names, self.key = case, case.names, key
        self.layers = []
        for i, name in enumerate(self.names):
            if name in KINDS:
                layer = plain_layer(KINDS[name].layer, jax.random.fold_in(key, i))
            else:
                layer = None
            self.layers.append(layer)

    def key_of(self, i, m, r):
        key = self.key
        for number in (len(self.layers), i, m, r):
            key = jax.random.fold_in(key, number)
        return key

    def run(self, params, state, m, r, inputs, *, training, old=None, span=None):
        """Runs layers.

        Args:
          params: per layer. old: those that products of a backward read; None: the same.
          m, r: numbers of the microbatch and the replica.
          inputs: an activation, the stashed values by name, and the sum of reports.
          span: first layer, and the one behind the last; None: all.

        Returns: the same as `inputs`, the new state, and what each layer got.
        """
        a, stashed, total = inputs
        state, seen = list(state), {}
        dtype = self.case.dtype_of_compute
        for i in range(*(span or (0, len(self.layers)))):
            name = self.names[i]
            a, seen[i] = cast(a, dtype), a
            values = cast(params[i], dtype)
            if name == "enter":
                a = enter(a)
            elif name == "leave":
                a = leave(a)
            elif name == "embedding":
                a = values["table"][a]
            elif name == "head":
                a = a @ values["table"].T
            elif name == "stash":
                stashed = {**stashed, "long": x_of(a)}
            elif name == "pop":
                stashed = dict(stashed)
                a = with_x(a, x_of(a) + jnp.tanh(stashed.pop("long")))
            elif old is not None and KINDS[name].mixed:
                module, kernel, bias = KINDS[name].mixed
                w, b = values[module][kernel], values[module][bias]
                y = mixed_product(x_of(a), w, cast(old[i], dtype)[module][kernel])
                a = with_x(a, y + b[None])
            else:
                reports: list = []
                if name == "weighed":
                    reports.append(squares(values))
                with reports_to(reports):
                    a, state[i] = self.layers[i](values, state[i], self.key_of(i, m, r), a, training)
                total = total + sum(reports) if training else total
        return (a, stashed, total), state, seen

    def moved(self, params, state, seen):
        """The state of batch norms after a minibatch: plain Flax on all rows, from what each microbatch got."""
        state, dtype = list(state), self.case.dtype_of_compute
        for i, name in enumerate(self.names):
            if name in KINDS and KINDS[name].norm:
                rows = jax.tree.map(
                    lambda *a: jnp.concatenate(a) if jnp.ndim(a[0]) else a[0],
                    *[each[i] for each in seen],
                )
                values = cast(params[i], dtype)
                _, state[i] = self.layers[i](values, state[i], self.key_of(i, 0, 0), cast(rows, dtype), True)
        return state


def loss_of_rows(case, outputs, batch):
    """`[rows]`."""
    if not case.vocabulary:
        outputs = outputs.astype(batch["targets"].dtype)
        return ((outputs - batch["targets"]) ** 2).mean(axis=-1)
    wide = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    chosen = jnp.take_along_axis(wide, batch["labels"][:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(wide, axis=-1) - chosen


def loss_parts(case, outputs, batch, total, of_rows=loss_of_rows):
    """Sum, weight and auxiliary value of a case's loss."""
    rows = of_rows(case, outputs, batch)
    if case.loss == "weighted":
        return (rows * batch["weights"]).sum(), batch["weights"].sum(), 0.0
    value = rows.mean()
    if case.loss == "reported":
        value = value + 0.1 * total
    return value, jnp.ones_like(value), jnp.square(rows).mean()


def outputs_of(model, params, state, batch):
    """In evaluation mode."""
    inputs = (batch["inputs"], {}, 0.0)
    return model.run(params, state, 0, 0, inputs, training=False)[0][0]
