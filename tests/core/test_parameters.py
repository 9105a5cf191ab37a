"Parameters: names and types are checked."

import pytest
from cis_nb.core.parameters import checked


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    "Every test has a store of its own."
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    for k in ('CIS_REPORT', 'CIS_EXPERIMENT', 'CIS_PROFILE', 'CIS_DATA'):
        monkeypatch.delenv(k, raising=False)
    return tmp_path / 'store'


@pytest.mark.parametrize('given', [dict(seeds=[0, 0]), dict(methods=['image_only', 'image_only'])])
def test_a_name_or_a_seed_twice_is_refused(given):
    defaults = dict(seeds=[0, 1], methods=['image_only'], weights=[0.5])
    with pytest.raises(ValueError, match='(seeds|methods) must hold each value once, like'):
        checked(given, defaults)
    free = dict(seeds=[1, 0], methods=['a', 'b'], weights=[1.0, 1.0])
    assert checked(free, defaults) == free


def test_checked_in_a_parameter_file():
    import yaml

    defaults = dict(lr=1e-3, epochs=2, tasks=['a'], note=None)
    assert checked(yaml.safe_load('lr: 1.0e-4\nnote: [1]'), defaults) == dict(lr=1e-4, epochs=2, tasks=['a'], note=[1])
    for text, words in [
        ('lr: 1e-4', 'f.yaml: lr .*write 1.0e-4'),
        ('lr: 1.5e6', r'write 1.5e\+6'),
        ('epoch: 3', "did you mean 'epochs'"),
        ('epochs: yes', 'epochs must be int'),
        ('tasks: a', 'tasks must be a list of str'),
        ('tasks: [a, 1]', 'a list of str'),
        ('epochs:', 'not None'),
        ('- lr', 'name: value'),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            checked(yaml.safe_load(text), defaults, 'f.yaml')
    assert (
        yaml.safe_load('lr: 1.0e-4')['lr'] == 1e-4 and yaml.safe_load('lr: 1.5e+6')['lr'] == 1.5e6
    )  # the remedies are right
