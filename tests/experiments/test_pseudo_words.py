"Figures of the pages on pseudo-words."

from types import SimpleNamespace

from figures import texts_outside

from cis_nb.experiments.pseudo_words import fusion_figure


def test_four_panels_of_weights_keep_their_labels_whole(monkeypatch):
    tasks = ['full', 'subset', 'circo', 'states']
    curve = {round(0.1 * n, 1): 10.0 + n for n in range(11)}
    tuned = SimpleNamespace(settings={t: curve for t in tasks}, weights={t: 0.5 for t in tasks})
    assert not texts_outside(fusion_figure(tuned, {t: t for t in tasks}), monkeypatch)
