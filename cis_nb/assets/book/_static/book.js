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

// Pages of the side bar without a result in this profile (absent.js) are lighter and say why.
document.addEventListener('DOMContentLoaded', () => {
  const root = new URL(document.documentElement.dataset.content_root || './', location.href).pathname;
  for (const link of document.querySelectorAll('.bd-sidebar-primary li a')) {
    const page = decodeURI(link.pathname).slice(decodeURI(root).length).replace(/\.html$/, '');
    const why = (window.cisAbsent || {})[page];
    if (!why) continue;
    link.classList.add('cis-absent');
    link.title = why;
  }
});
