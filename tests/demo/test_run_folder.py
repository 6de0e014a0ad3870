"""What a run keeps beside the buffer."""

import pytest

from replaybuf import ReplayBufError
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.weights import Saved


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


def test_two_trainers_cant_share_a_folder(folder):
    with folder.locked(), pytest.raises(ReplayBufError, match="another demo is running"), folder.locked():
        pass
    with folder.locked():  # free again
        pass


def test_a_folder_that_cant_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ReplayBufError, match="can't write to the run folder"), RunFolder(tmp_path / "file").locked():
        pass


def test_a_run_goes_to_its_steps_and_when_it_has_ended_as_many_more(folder):
    assert [folder.target(step, 200) for step in (0, 57, 199)] == [200] * 3
    folder.finish()
    assert [folder.target(step, 200) for step in (200, 250, 400)] == [400] * 3
    folder.finish()
    assert folder.target(400, 100) == 500


def test_a_run_that_was_killed_at_its_end_has_nothing_left_to_do(folder):
    folder.target(0, 200)
    assert folder.target(200, 200) == 200


def test_a_spoilt_target_is_forgotten(folder):
    folder.target(0, 200)
    (folder.path / "target.txt").write_text("")
    assert [folder.target(step, 200) for step in (57, 200, 210)] == [200, 200, 410]


def test_more_steps_extend_a_run(folder):
    folder.target(0, 5)
    assert folder.target(3, 10) == 10


def test_rewards_of_steps_that_were_lost_are_replaced(folder):
    trainer = Trainer.create(0)
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        trainer.step = step
        folder.save(Saved(trainer, 0), reward)
    with open(folder.path / "rewards.txt", "a") as file:
        file.write("4")  # cut off by a crash
    assert folder.rewards(2) == [0.1, 0.25]


def test_clear_removes_all_but_the_lock(folder):
    with folder.locked():
        folder.save(Saved(Trainer.create(0), 0), 0.5)
        folder.target(0, 5)
        folder.log(0).touch()
        folder.clear()
        assert [path.name for path in folder.path.iterdir()] == ["lock"]
