"""A widget's panel in JupyterLab, moved as a person without a mouse does: Tab to a control, a key, and look.

panel.move(control, keys)   milliseconds from the last key to the new picture; AssertionError if nothing changes
panel.move_all()            every control that is not greyed out, there and back; of boxes only the last comes back
"""

from browser import CELL_PATIENCE, PATIENCE

PANELS = ".jp-OutputArea-output:not(.jupyter-widgets *) > .jupyter-widgets"
CONTROLS = "select, .noUi-handle, input:not([type=hidden]), textarea, button"
FAR = 30  # presses of Tab from one control to the next: above any


class Panel:
    def __init__(self, notebook, number):
        self.notebook, self.page = notebook, notebook.page
        self.root = notebook.panel.locator(PANELS).nth(number)

    def controls(self):
        """The controls that can be moved now, in the order of the page."""
        return [one for one in self.root.locator(CONTROLS).all() if one.evaluate(ENABLED)]

    def name(self, control):
        return control.evaluate(NAME)

    def tab_to(self, control):
        """With Tab alone, from where the focus is."""
        for _ in range(FAR):
            if control.evaluate("control => control === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {self.name(control)!r}")

    def move(self, control, keys):
        self.root.evaluate(WATCH)
        for key in keys:
            self.page.keyboard.press(key)
        ms = self.page.evaluate(MOVED, PATIENCE)
        assert ms is not None, f"{self.name(control)!r} was moved, and nothing that the panel shows has changed"
        self.notebook.wait_idle(CELL_PATIENCE)  # what else this change brings is not the next one's
        return ms

    def move_all(self):
        controls, times = self.controls(), {}
        controls[0].focus()
        self.page.keyboard.press("Shift+Tab")
        for control in controls:
            self.tab_to(control)
            times[self.name(control)] = [self.move(control, keys) for keys in control.evaluate(KEYS)]
        return times


ENABLED = "control => !control.disabled && !control.closest('[disabled]') && control.getClientRects().length > 0"

NAME = """
(control) => {
  const box = control.closest('.widget-inline-hbox');
  return (box && box.innerText.split('\\n')[0].trim()) || control.innerText.trim() || control.outerHTML;
}
"""

# The keys that move a control to another value, and those that bring it back: a filter must not empty the next one's.
# A box stays as it is then, while others are ticked.
KEYS = """
(control) => {
  const at = (name) => Number(control.getAttribute(name));
  const either = (more, up, down) => more ? [[up], [down]] : [[down], [up]];
  if (control.tagName === 'SELECT')
    return either(control.selectedIndex + 1 < control.options.length, 'ArrowDown', 'ArrowUp')
      .map(([arrow]) => ['Space', arrow, 'Enter']);  // JupyterLab takes arrows for itself until a menu is open
  if (control.classList.contains('noUi-handle'))
    return either(at('aria-valuenow') < at('aria-valuemax'), 'ArrowRight', 'ArrowLeft');
  if (control.tagName === 'BUTTON') return [['Enter']];
  const others = [...document.querySelectorAll('[type=checkbox]:checked')].filter(one => one !== control);
  if (control.type === 'checkbox') return others.length ? [['Space']] : [['Space'], ['Space']];
  return [['End', '1', 'Enter'], ['End', 'Backspace', 'Enter']];
}
"""

# What a panel shows is its text and its pictures, without the controls themselves. Until there is something new, and
# the browser can draw it.
WATCH = """
(panel) => {
  const own = '.widget-inline-hbox:has(select, input, textarea, button, .noUi-handle), button';
  const seen = () => {
    const copy = panel.cloneNode(true);
    copy.querySelectorAll(own).forEach((control) => control.remove());
    const pictures = [...copy.querySelectorAll('img, svg')].map((one) => one.src || one.outerHTML);
    return [copy.textContent, ...pictures].join();
  };
  const before = seen();
  let start = performance.now();
  const again = () => { start = performance.now(); };
  panel.addEventListener('keydown', again, {capture: true});
  window.moved = new Promise((resolve) => {
    const observer = new MutationObserver(async () => {
      if (seen() === before) return;
      observer.disconnect();
      panel.removeEventListener('keydown', again, {capture: true});
      await Promise.all([...panel.querySelectorAll('img')].map((image) => image.decode().catch(() => {})));
      resolve(performance.now() - start);
    });
    observer.observe(panel, {subtree: true, childList: true, characterData: true, attributes: true});
  });
}
"""
MOVED = "patience => Promise.race([window.moved, new Promise(late => setTimeout(late, patience, null))])"
