"Where a figure draws its texts."

from matplotlib.text import Text


def drawn_texts(fig, monkeypatch) -> list:  # of (text, box in pixels)
    "Each text that a `Page` draws, where it is drawn."
    found, draw = {}, Text.draw

    def recorded(text, renderer, *args, **kw):
        if text.get_visible() and text.get_text().strip():
            found[id(text)] = (text.get_text(), text.get_window_extent(renderer))
        return draw(text, renderer, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(Text, 'draw', recorded)
        fig.png()
    return [*found.values()]


def texts_outside(fig, monkeypatch) -> list:
    "The texts of a figure that its edge cuts."
    width, height = fig.get_size_inches() * fig.dpi
    inside = {
        text: b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for text, b in drawn_texts(fig, monkeypatch)
    }
    return [text for text, whole in inside.items() if not whole]
