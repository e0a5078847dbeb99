# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Made-up results of studies, in the form of `model_cards/evidence/results/NAME-SIZE.json`: numbers with known differences."""

import math
from random import Random


STEPS = 200
WINDOWS = 16


def routed_depths(rng: Random, layers: int, routes: tuple[str, ...], sharpness: float, likeness: float) -> list[dict]:
    """Reads of a routed arm: `sharpness` above uniform routing, sources that grow alike by `likeness`."""
    rows = []
    for route in routes:
        for sublayer in range(1, 2 * layers + 1):
            sources = min(2 + sublayer // 4, 9)
            depth = sublayer / (2 * layers)
            weight = 1 / sources + sharpness * (1 - 1 / sources) * (0.6 + 0.4 * rng.random())
            name = "model.final_read" if sublayer == 2 * layers else f"model.layers.{sublayer // 2}.attn_read"
            rows.append(
                {
                    "name": name if sublayer % 2 == 0 else name.replace("attn", "mlp"),
                    "route": route,
                    "sublayer": sublayer,
                    "sources": sources,
                    "max_weight": weight,
                    "entropy_normalized": 1 - sharpness,
                    "cosine": likeness * depth + 0.1 * rng.random(),
                }
            )
    return rows


def measures_of(rows: list[dict], layers: int, rng: Random) -> dict[str, float]:
    """What a run reports of its routing."""
    found: dict[str, float] = {}
    routes = list(dict.fromkeys(row["route"] for row in rows))
    for route in routes:
        deep = [row for row in rows if row["route"] == route][-max(1, 2 * layers // 3) :]
        where = "" if route == "main" else f", {route}"
        found[f"max weight{where}"] = rows[0]["max_weight"]
        found[f"max weight, deepest third{where}"] = sum(row["max_weight"] for row in deep) / len(deep)
        found[f"uniform weight, deepest third{where}"] = sum(1 / row["sources"] for row in deep) / len(deep)
        found[f"cosine of sources, deepest third{where}"] = sum(row["cosine"] for row in deep) / len(deep)
    if "value" in routes:
        found["JS of QK and V routes (nats)"] = 0.2 + 0.02 * rng.random()
    if "stream 1" in routes:
        found["CKA of streams, same depth"] = 0.5 + 0.1 * rng.random()
        found["rescue gain on the loss, stream 0"] = 0.4 + 0.1 * rng.random()
        found["rescue gain on the loss, stream 1"] = 0.3 + 0.1 * rng.random()
    return found


def synthetic_run(seed: int, effect: float, spread: float, layers: int, routing: tuple | None, salt: str) -> dict:
    """One run: `effect` nats above the baseline, give or take `spread` from seed to seed."""
    rng = Random(f"{seed} {salt}")
    shared = Random(seed)
    loss = 2.0 + 0.05 * shared.gauss(0, 1) + effect + spread * rng.gauss(0, 1)
    base = [0.3 * shared.gauss(0, 1) for _ in range(WINDOWS)]
    middle = sum(base) / WINDOWS
    noise = [0.2 * spread * rng.gauss(0, 1) for _ in range(WINDOWS)]
    noise_middle = sum(noise) / WINDOWS
    windows = [loss + value - middle + extra - noise_middle for value, extra in zip(base, noise)]
    steps = range(0, STEPS + 1, 20)
    curve = [[step, loss + 4 * math.exp(-step / 30) + 0.2 * spread * rng.gauss(0, 1)] for step in steps]
    curve[-1][1] = loss
    training = [[step, loss + 4 * math.exp(-step / 30) + 0.1 * shared.gauss(0, 1)] for step in range(1, STEPS + 1, 4)]
    rows = routed_depths(rng, layers, *routing) if routing else []
    return {
        "seed": seed,
        "loss": loss,
        "first_loss": curve[0][1],
        "windows": windows,
        "curve": curve,
        "training": training,
        "largest_rise": max(0.0, max(value for _, value in training) - training[0][1]),
        "seconds": 60.0,
        "measures": measures_of(rows, layers, rng) if routing else {},
        "by_depth": rows,
    }


def synthetic_arm(name: str, effect: float, seeds, spread=0.003, layers=6, routing=None, group="all", **values) -> dict:
    """An arm; `routing`: routes, sharpness, likeness, or None for one without reads."""
    return {
        "preset": values.get("preset", name),
        "fields": values.get("fields", {}),
        "describes": values.get("describes", f"the arm {name}"),
        "parameters": {"total": 1_234_567, "routing": 4_608 if routing else 0},
        "command": f"depthroute train --preset {name} --seed {seeds[0]} --output_dir runs/{name}",
        "tokens": 819_200,
        "steps": STEPS,
        "learning_rate": 1e-3,
        "routing_learning_rate": 3e-3 if routing else None,
        "runs": [synthetic_run(seed, effect, spread, layers, routing, f"{group} {name}") for seed in seeds],
    }


BLOCK = (("main",), 0.3, 0.3)
ROUTES = (("main", "value"), 0.35, 0.3)
STREAMS = (("stream 0", "stream 1"), 0.4, 0.4)
COLLAPSED = (("main",), 0.01, 0.95)


def synthetic_results(groups: dict[str, dict], claims: list[dict], **values) -> dict:
    """Results of a study whose baseline is `attnres-block`."""
    return {
        "study": "made-up",
        "size": "cpu",
        "title": "A made-up study",
        "question": "Does anything differ?",
        "paper": "A made-up paper",
        "command": "depthroute reproduce made-up --size cpu",
        "commit": "abc1234",
        "date": "2026-11-30",
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "device": "cpu",
            "workers": 2,
            "threads_per_run": 1,
            "python": "3.11.2",
            "torch": "2.13.0",
            "transformers": "5.24.0",
        },
        "text": {
            "name": "the Python 3.11 standard library's sources",
            "digest": "0123456789abcdef",
            "train_documents": 500,
            "validation_documents": 40,
        },
        "seconds": {"forecast": 1500.0, "runs": 2900.0, "elapsed": 1530.0},
        "baseline": "attnres-block",
        "noise_arm": "rounding twin",
        "planned": {"seeds": [1, 2, 3, 4, 5], "note": ""},
        "definition": {"notes": ["Small models on little text."], "claims": claims, "arms": {}},
        "groups": {name: {"arms": arms} for name, arms in groups.items()},
        **values,
    }


def one_group(seeds=(1, 2, 3, 4, 5), fewer=None) -> dict:
    """Baseline, its twin, one clearly lower, one about the same, one without routing that is clearly higher."""
    arms = {
        "standard": synthetic_arm("standard", 0.05, seeds),
        "attnres-block": synthetic_arm("attnres-block", 0.0, seeds, routing=BLOCK, describes="blocks, the baseline"),
        "rounding twin": synthetic_arm(
            "rounding twin",
            0.0,
            seeds,
            spread=0.004,
            routing=BLOCK,
            preset="attnres-block",
            describes="in another order",
        ),
        "rd-attnres": synthetic_arm("rd-attnres", -0.03, fewer or seeds, routing=ROUTES, describes="two routes"),
        "states": synthetic_arm("states", 0.0005, seeds, spread=0.01, routing=COLLAPSED, preset="attnres-states"),
    }
    twins = (arms["attnres-block"]["runs"], arms["rounding twin"]["runs"])
    for original, twin in zip(*twins):
        rng = Random(f"twin {twin['seed']}")
        twin["loss"] = original["loss"] + 0.002 * rng.choice((-1, 1))
        twin["windows"] = [
            value + (twin["loss"] - original["loss"]) * (1 + 0.5 * (-1) ** at)
            for at, value in enumerate(original["windows"])
        ]
        twin["curve"] = [[step, value + 0.002 * rng.gauss(0, 1)] for step, value in original["curve"]]
    return arms


CLAIMS = [
    {
        "says": "Two routes lower the loss by 0.0301 nats, in 10 of 10 pairs",
        "measure": "loss",
        "arm": "rd-attnres",
        "against": "attnres-block",
        "expect": "lower",
    },
    {
        "says": "The standard residual is better | or so",
        "measure": "loss",
        "arm": "standard",
        "against": "attnres-block",
        "expect": "lower",
    },
    {
        "says": "States are worse by 6.9% of perplexity",
        "measure": "loss",
        "arm": "states",
        "against": "attnres-block",
        "expect": "higher",
    },
    {
        "says": "The divergence of the routes is 0.218",
        "measure": "JS of QK and V routes (nats)",
        "arm": "rd-attnres",
        "expect": "at_least",
        "value": 0.1,
    },
]


def by_depth() -> dict:
    """12, 24 and 48 layers, given in another order; the benefit appears with depth."""
    groups = {}
    for layers, effect in ((48, -0.03), (12, 0.01), (24, -0.001)):
        group, seeds = f"{layers} layers", (1, 2, 3)
        options = {"layers": layers, "group": group}
        groups[group] = {
            "attnres-block": synthetic_arm("attnres-block", 0.0, seeds, routing=BLOCK, **options),
            "wav": synthetic_arm("wav", effect, seeds, routing=BLOCK, **options),
            "rezero": synthetic_arm("rezero", 0.02, seeds, **options),
        }
        if layers == 12:
            groups[group]["rounding twin"] = synthetic_arm("rounding twin", 0.0, seeds, spread=0.001, **options)
    claims = [
        {
            "says": "WAV lowers perplexity by 2.19% at 48 layers",
            "measure": "loss",
            "arm": "wav",
            "against": "attnres-block",
            "expect": "lower",
            "groups": ["48 layers"],
        },
        {
            "says": "ReZero is worse",
            "measure": "loss",
            "arm": "rezero",
            "against": "attnres-block",
            "expect": "higher",
        },
    ]
    return synthetic_results(
        groups, claims, paper="WAV", planned={"seeds": [1, 2, 3, 4, 5], "note": "Two seeds fewer."}
    )


def two_streams() -> dict:
    """An arm of two streams, and one that starts far away: the scale of the figure has to hold both."""
    arms = one_group() | {"dar": synthetic_arm("dar", -0.01, (1, 2, 3, 4, 5), routing=STREAMS)}
    arms["plain"] = synthetic_arm("plain", 1.5, (1, 2, 3, 4, 5), spread=0.2, preset="attnres-block")
    claims = [
        {
            "says": "A plain start is not the source's",
            "measure": "first_loss",
            "arm": "plain",
            "against": "attnres-block",
            "expect": "higher",
        }
    ]
    return synthetic_results({"all": arms}, claims)


CASES = {
    "one group": lambda: synthetic_results({"all": one_group()}, CLAIMS),
    "groups by depth": by_depth,
    "one seed": lambda: synthetic_results({"all": one_group(seeds=(1,))}, CLAIMS),
    "fewer seeds in an arm": lambda: synthetic_results({"all": one_group(fewer=(1, 2, 4))}, CLAIMS),
    "two streams": two_streams,
    "no claims, no routing": lambda: synthetic_results(
        {"all": {name: arm for name, arm in one_group().items() if name == "standard"}}, [], baseline="standard"
    ),
}
"""One of each kind of results, by a function, since a test may change what it is given."""
