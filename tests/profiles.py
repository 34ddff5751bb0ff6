"""Profiles by hand, and of the small families with bytes alone."""

import dataclasses
import functools

import optax
from families import FAMILIES, cross_entropy

import jpipe
from jpipe.plan import PROGRAMS, Profile, Seconds


@functools.cache
def profile_of(family: str, microbatch_size: int = 2) -> Profile:
    """Of a family trained with Adam; nothing is measured."""
    pipe = jpipe.Pipeline(
        FAMILIES[family].layers,
        loss=cross_entropy,
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(1, 1),
    )
    return pipe.profile(FAMILIES[family].batches(1, microbatch_size)[0], programs=())


def timed(profile: Profile, **seconds: float) -> Profile:
    """The profile with these seconds for every layer, by program; 0 for one that is not named, and for the loss."""

    def of(layer, share=1.0):
        times = {p: Seconds(share * seconds.get(p, 0.0)) for p in PROGRAMS}
        return dataclasses.replace(layer, **times)

    layers = tuple(map(of, profile.layers))
    return dataclasses.replace(profile, layers=layers, loss=of(profile.loss, 0.0))
