// The parts of the side bar fold: the part of the open page is shown, a click on a part's name opens or closes it.
document.addEventListener('DOMContentLoaded', () => {
  for (const caption of document.querySelectorAll('.bd-sidebar-primary p.caption')) {
    const list = caption.nextElementSibling;
    if (!list || list.tagName !== 'UL') continue;
    const show = (open) => {
      list.hidden = !open;
      caption.setAttribute('aria-expanded', open);
    };
    caption.setAttribute('role', 'button');
    caption.tabIndex = 0;
    caption.addEventListener('click', () => show(list.hidden));
    caption.addEventListener('keydown', (e) => { if (e.key === 'Enter') show(list.hidden); });
    show(list.querySelector('.current') !== null);
  }
});

// A figure that is narrow by itself fits a phone and needs no scrolling.
document.addEventListener('DOMContentLoaded', () => {
  const mark = (img) => img.classList.toggle('cis-narrow', img.naturalWidth > 0 && img.naturalWidth <= 560);
  for (const img of document.querySelectorAll('.cell_output > img')) {
    mark(img);
    img.addEventListener('load', () => mark(img));
  }
});
