"""A run in half precision goes on to the bit, and changes its precision without losing the optimizer's state."""

from __future__ import annotations

import pytest

from tests.device.precisions import HALF, SMALL, distances, roundoff
from tests.device.run import train_many
from tests.training import NO_DROPOUT

AUTO = "Engine.save_load.ckpt_dir=auto"
MOMENTS = {"moment1", "moment2", "beta1_pow", "beta2_pow"}

#: each goes on for two updates from the one before
CHAIN = ("float32", "float16 O2", "float32", "bfloat16 main gradients", "bfloat16 O2")
FULL = {"float32": (), **HALF}

#: a loss scale that overflows: the update is skipped
TOO_LARGE = "Engine.mix_precision.scale_loss=1099511627776"
#: one that overflows three to five times
LARGE = "Engine.mix_precision.scale_loss=4194304"
FLOAT16 = [kind for kind in HALF if kind.startswith("float16")]

OTHER_OPTIMIZERS = {"SGD": set(), "Momentum": {"velocity"}, "Adam": MOMENTS}
DEEPER = ("bfloat16 O2", "bfloat16 main gradients")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """`KIND whole` and `KIND/1`, `KIND/2`, with dropout; `chain/N` beside `float32 whole`, without."""
    runs = {}
    for kind, overrides in HALF.items():
        runs[f"{kind} whole"] = (*SMALL, *overrides, "Engine.max_steps=4")
        runs[f"{kind}/1"] = (*SMALL, *overrides, "Engine.max_steps=2")
        runs[f"{kind}/2"] = (*SMALL, *overrides, "Engine.max_steps=4", AUTO)
    still = (*SMALL, *NO_DROPOUT)
    runs["float32 whole"] = (*still, "Engine.max_steps=10", "Engine.save_load.save_steps=2")
    for number, kind in enumerate(CHAIN):
        runs[f"chain/{number}"] = (*still, *FULL[kind], f"Engine.max_steps={2 * number + 2}", AUTO)
    for kind in FLOAT16:
        runs[f"skipped {kind}/1"] = (*SMALL, "Engine.max_steps=2")
        runs[f"skipped {kind}/2"] = (*SMALL, *HALF[kind], TOO_LARGE, "Engine.max_steps=3", AUTO)
        runs[f"counting {kind} whole"] = (*SMALL, *HALF[kind], LARGE, "Engine.max_steps=8")
        runs[f"counting {kind}/1"] = (*SMALL, *HALF[kind], LARGE, "Engine.max_steps=2")
        runs[f"counting {kind}/2"] = (*SMALL, *HALF[kind], LARGE, "Engine.max_steps=8", AUTO)
    for name in OTHER_OPTIMIZERS:
        o2 = (*SMALL, *HALF["float16 O2"], f"Optimizer.name={name}")
        runs[f"{name} whole"] = (*o2, "Engine.max_steps=4")
        runs[f"{name}/1"] = (*o2, "Engine.max_steps=2")
        runs[f"{name}/2"] = (*o2, "Engine.max_steps=4", AUTO)
        runs[f"{name} from float32/1"] = (*SMALL, f"Optimizer.name={name}", "Engine.max_steps=2")
        runs[f"{name} from float32/2"] = (*o2, "Engine.max_steps=4", AUTO)
    for kind in DEEPER:
        runs[f"deeper {kind}/1"] = (*SMALL, "Engine.max_steps=2")
        grown = ("Model.num_layers=3", "Engine.save_load.strict=false", "Engine.max_steps=4")
        runs[f"deeper {kind}/2"] = (*SMALL, *HALF[kind], *grown, AUTO)
    return train_many(runs, tmp_path_factory.mktemp("resume"))


def same_to_the_bit(resumed, whole, step):
    """The run that went on to `step` left what the one that ran through left."""
    assert resumed.code == 0, resumed.launched.logs[0][-3000:]
    losses = whole.losses()
    assert resumed.losses()[-len(losses) :] == losses
    left, right = whole.tensors(step), resumed.tensors(step)
    assert left.keys() == right.keys()
    assert [key for key in left if left[key].tobytes() != right[key].tobytes()] == []


def slots_by_name(outcome, step):
    """Parameter → what is stored for it beside the weight."""
    saved = outcome.checkpoint(step)
    return {name: set(saved.slots_of(name)) - {""} for name in saved.shapes()}


@pytest.mark.parametrize("kind", HALF)
class TestSameKind:
    def test_all_moments_are_stored(self, outcomes, kind):
        slots = slots_by_name(outcomes[f"{kind} whole"], 4)
        # 2 embeddings; per block 2 norms, q, k, v, out, up, down with a weight and a bias each; the last norm
        assert len(slots) == 2 + 2 * 8 * 2 + 2
        assert all(found == MOMENTS for found in slots.values()), slots

    def test_powers_of_the_betas_count_the_updates(self, outcomes, kind):
        """They begin with β, for the first update, and are multiplied by β in each: β⁵ after four."""
        tensors = outcomes[f"{kind} whole"].tensors(4)
        for slot, beta in {"beta1_pow": 0.9, "beta2_pow": 0.999}.items():
            powers = [float(value[0]) for key, value in tensors.items() if key.endswith(slot)]
            assert powers and powers == pytest.approx([beta**5] * len(powers), rel=1e-6)

    def test_two_and_two_updates_are_four_to_the_bit(self, outcomes, kind):
        same_to_the_bit(outcomes[f"{kind}/2"], outcomes[f"{kind} whole"], 4)


@pytest.mark.parametrize("number", range(1, len(CHAIN)))
class TestOtherKind:
    """Rounding is that of the coarsest type so far; see test_half_precision.py for the bounds."""

    @staticmethod
    def coarsest(number):
        return max(roundoff(kind) for kind in CHAIN[1 : number + 1] if kind in HALF)

    def test_losses_go_on(self, outcomes, number):
        run, steps = outcomes[f"chain/{number}"], slice(2 * number, 2 * number + 2)
        assert run.code == 0, run.launched.logs[0][-3000:]
        expected = outcomes["float32 whole"].losses()[steps]
        assert run.losses()[steps] == pytest.approx(expected, rel=self.coarsest(number) / 4)

    def test_moments_go_on(self, outcomes, number):
        """Two updates after a resume without them, 0.9² = 81 % of the first moment would be missing."""
        step = 2 * number + 2
        run, whole = outcomes[f"chain/{number}"], outcomes["float32 whole"]
        assert all(found >= MOMENTS for found in slots_by_name(run, step).values())
        for slot in ("moment1", "moment2"):
            found = distances(run.tensors(step), whole.tensors(step), slot)
            assert max(found.values()) < 10 * self.coarsest(number), max(found, key=found.get)

    def test_powers_of_the_betas_go_on(self, outcomes, number):
        step = 2 * number + 2
        tensors = outcomes[f"chain/{number}"].tensors(step)
        powers = [float(value[0]) for key, value in tensors.items() if key.endswith("beta1_pow")]
        assert powers == pytest.approx([0.9 ** (step + 1)] * len(powers), rel=1e-6)

    def test_the_ledger_counts_them(self, outcomes, number):
        """4 slots of the 36 parameters."""
        assert f"  {'optimizer':<18} {4 * 36} tensors" in outcomes[f"chain/{number}"].launched.logs[0]


@pytest.mark.parametrize("kind", FLOAT16)
def test_what_a_resume_restores_is_what_was_saved(outcomes, kind):
    """The first update after it overflows and is skipped, so the next checkpoint holds what the resume put in place."""
    before, after = outcomes[f"skipped {kind}/1"].tensors(2), outcomes[f"skipped {kind}/2"].tensors(3)
    for key, value in before.items():
        assert after[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("kind", FLOAT16)
def test_a_resume_amid_overflows_goes_on_to_the_bit(outcomes, kind):
    whole = outcomes[f"counting {kind} whole"]
    skipped = [record["found_inf"] for record in whole.records()]
    assert skipped[:3] == [1, 1, 1] and skipped[-1] == 0
    same_to_the_bit(outcomes[f"counting {kind}/2"], whole, 8)


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
class TestOtherOptimizers:
    def test_two_and_two_updates_are_four_to_the_bit(self, outcomes, name):
        same_to_the_bit(outcomes[f"{name}/2"], outcomes[f"{name} whole"], 4)

    def test_from_float32(self, outcomes, name):
        """Half a run in float32 and half at level O2 is all of it at O2, but for rounding."""
        run, whole = outcomes[f"{name} from float32/2"], outcomes[f"{name} whole"]
        assert run.code == 0, run.launched.logs[0][-3000:]
        assert run.losses() == pytest.approx(whole.losses(), rel=roundoff("float16 O2") / 4)
        assert all(found == OTHER_OPTIMIZERS[name] for found in slots_by_name(run, 4).values())


@pytest.mark.parametrize("kind", DEEPER)
def test_a_deeper_model_begins_its_new_parameters_anew(outcomes, kind):
    """`strict: false`: the third block's moments are those of a new run, the others' go on."""
    run = outcomes[f"deeper {kind}/2"]
    assert run.code == 0, run.launched.logs[0][-3000:]
    tensors = run.tensors(4)
    for path, updates in {"embedding.position": 4, "blocks.0.mlp.up": 4, "blocks.2.mlp.up": 2}.items():
        assert float(tensors[f"{path}.weight.beta1_pow"][0]) == pytest.approx(0.9 ** (updates + 1))
