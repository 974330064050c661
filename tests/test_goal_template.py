"""Goal templates: what is stored, what is refused, distance and reward."""

import json
import os

import numpy as np
import pytest
import torch

from envs import BadInput
from envs.pixels import goals
from envs.pixels.goals import ARRAY, META, GoalConfig, goal_step, l1_distance, load_goal, save_goal

FIELDS = dict(action_codec_id="gb8", frames_per_step=24, downsample_h=6, downsample_w=5, stack_k=2, tau=0.05,
              k_consecutive=4, pipeline_version="p1", sha256={"world": "ab" * 32})


def picture(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 4, shape, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Of a goal."""
    save_goal(tmp_path / "goal", picture(6, 5), **FIELDS)
    return tmp_path / "goal"


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5)])
def test_what_is_saved_is_loaded(tmp_path, shape):
    frames, folder = picture(*shape), tmp_path / "new" / "goal"
    meta = save_goal(folder, frames, **FIELDS, note="extra fields are kept")
    found, found_meta = load_goal(folder, **FIELDS)
    assert found.dtype == np.uint8 and (found == frames).all() and found_meta == meta
    assert meta["schema_version"] == 1 and meta["shade_levels"] == 4 and meta["dist_metric"] == "l1_mean_norm"
    assert meta["created_at"].endswith("+00:00") and meta["note"] == "extra fields are kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["new", "goal", ARRAY, META])


@pytest.mark.parametrize(("field", "value", "message"), [
    ("tau", 0.04, "tau is 0.05, expected 0.04"), ("nonsense", 1, "nonsense is None, expected 1"),
    ("sha256", {"world": "cd" * 32}, "sha256.world is 'abab"),
    ("sha256", {"rom": "cd" * 32}, "sha256.rom is None"),
])
def test_expectations(folder, field, value, message):
    with pytest.raises(BadInput) as error:
        load_goal(folder, **FIELDS | {field: value})
    assert message in str(error.value) and str(folder) in str(error.value)
    load_goal(folder, **{field: None})  # is not checked


@pytest.mark.parametrize(("frames", "change", "message"), [
    (picture(6, 5).astype(np.int64), {}, "dtype is int64"), (picture(6, 5).tolist(), {}, "expected an array"),
    (picture(5, 6), {}, "shape is (5, 6)"), (picture(6, 5) + np.uint8(1), {}, "shade 4"),
    (picture(6, 5), {"tau": float("nan")}, "tau is nan"), (picture(6, 5), {"stack_k": True}, "is True"),
    (picture(6, 5), {"sha256": {"rom": "x"}}, "sha256.rom is 'x'"),
])
def test_what_cannot_be_a_goal_is_not_saved(tmp_path, frames, change, message):
    with pytest.raises(BadInput) as error:
        save_goal(tmp_path / "goal", frames, **FIELDS | change)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def rewrite(folder, **change):
    meta = json.loads((folder / META).read_text()) | change
    (folder / META).write_text(json.dumps({key: value for key, value in meta.items() if value is not None}))


class Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / ARRAY).unlink(), "goal_template.npy is missing"),
    (lambda f: (f / META).unlink(), "goal_template.meta.json is missing"),
    (lambda f: (f / META).write_bytes(b"\xff\xfe{}"), "meta.json cannot be read"),
    (lambda f: (f / META).write_text("[" * 100_000), "meta.json cannot be read"),
    (lambda f: (f / META).write_text("[]"), "no object"),
    (lambda f: rewrite(f, schema_version=2), "schema_version is 2, expected 1"),
    (lambda f: rewrite(f, created_at=None), "created_at is missing"),
    (lambda f: rewrite(f, downsample_h=7), "shape is (6, 5), expected (7, 5)"),
    (lambda f: rewrite(f, pipeline_version="x" * 10**6, k_consecutive="y" * 10**6), "k_consecutive is 'yyy"),
    (lambda f: np.save(f / ARRAY, picture(6, 5, seed=1)), "template_sha256"),
    (lambda f: np.save(f / ARRAY, np.zeros((0, 5), np.uint8)), "goal"),  # cannot be mapped everywhere
    (lambda f: np.save(f / ARRAY, np.array([Bomb()]), allow_pickle=True), "cannot be read"),
    (lambda f: (f / ARRAY).write_bytes((f / ARRAY).read_bytes()[:-5]), "cannot be read"),
    (lambda f: np.savez(open(f / ARRAY, "wb"), a=picture(6, 5)), "no array"),
    (lambda f: (f / ARRAY).write_bytes((f / ARRAY).read_bytes().replace(
        b"(6, 5), }          ", b"(9999999, 9999999)}")), "be read"),
])
def test_damage_is_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(BadInput) as error:
        load_goal(folder)
    assert message in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_only_force_replaces_and_only_a_goal(folder, tmp_path):
    with pytest.raises(BadInput, match="exists"):
        save_goal(folder, picture(6, 5, seed=1), **FIELDS)
    save_goal(folder, picture(6, 5, seed=1), force=True, **FIELDS)
    assert (load_goal(folder)[0] == picture(6, 5, seed=1)).all() and len(list(tmp_path.iterdir())) == 1

    (folder / "thesis.txt").write_text("the only copy")
    (tmp_path / "file").write_text("x")
    for place in (folder, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="more than a goal template|cannot be written"):
            save_goal(place, picture(6, 5), force=True, **FIELDS)
    assert (folder / "thesis.txt").exists() and (tmp_path / "file").read_text() == "x"


def test_an_interrupted_save_leaves_the_old_goal(folder, tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(goals, "_sync", full)
        for place in (folder, tmp_path / "other"):
            with pytest.raises(BadInput, match="No space left"):
                save_goal(place, picture(6, 5, seed=1), force=True, **FIELDS)
    assert [path.name for path in tmp_path.iterdir()] == ["goal"]
    assert (load_goal(folder)[0] == picture(6, 5)).all()

    for seed in (2, 3):
        save_goal(folder, picture(6, 5, seed=seed), force=True, **FIELDS)
        assert [path.name for path in tmp_path.iterdir()] == ["goal"]
        assert (load_goal(folder)[0] == picture(6, 5, seed=seed)).all()
        monkeypatch.setattr(goals, "_exchange", lambda left, right: False)


def test_distance():
    frames = torch.from_numpy(picture(7, 2, 6, 5))
    for shape, seen in (((6, 5), frames[:, -1:]), ((2, 6, 5), frames), ((7, 2, 6, 5), frames)):
        goal = torch.from_numpy(picture(*shape, seed=3))
        dist, expected = l1_distance(frames, goal), (seen.double() - goal).abs().mean((1, 2, 3)) / 3
        assert dist.dtype == torch.float32 and torch.allclose(dist.double(), expected, atol=1e-7)
    light, dark = torch.zeros(1, 1, 6, 5, dtype=torch.uint8), torch.full((1, 1, 6, 5), 3, dtype=torch.uint8)
    assert l1_distance(light, dark[0]).item() == l1_distance(dark, light[0]).item() == 1  # no wrap below 0
    for shape, dtype in (((3, 6, 5), torch.uint8), ((5, 6), torch.uint8), ((6, 5), torch.float32)):
        with pytest.raises(ValueError):
            l1_distance(frames, torch.zeros(shape, dtype=dtype))


def test_steps_towards_a_goal():
    """Nearer; close; at tau, which is not below it; the last step but one; all at once."""
    reward, *ends = goal_step(
        torch.tensor([0.4, 0.04, 0.05, 0.5, 0.0]), torch.tensor([0.5, 0.04, 0.05, 0.5, 0.1]),
        torch.tensor([0, 2, 3, 0, 3]), torch.tensor([0, 0, 0, 126, 127]), GoalConfig())
    assert reward.dtype == torch.float32
    assert reward.tolist() == pytest.approx([0.09, -0.01, -0.01, -0.01, 10.09], abs=1e-5)
    ended = [False, False, False, False, True]
    assert [x.tolist() for x in ends] == [ended, ended, [0, 3, 0, 0, 4], [1, 1, 1, 127, 128]]
    options = GoalConfig(alpha=2.0, step_cost=0.0, goal_bonus=5.0, tau=0.41, k_consecutive=1)
    assert goal_step(*torch.tensor([0.4, 0.5]), 0, 0, options)[0].item() == pytest.approx(5.2)
