// What the reader does, as transitions of the store.
import { readForm, readMoment, readStep } from "./address.js";
import { FIELDS, readRequest } from "./request.js";
import { STEPS } from "./steps.js";
import { $ } from "./views/draw.js";
import { indexAt, measure } from "./views/stage.js";
import { characterAt } from "./views/text.js";

/** Listen to the reader. Returns { submit }. */
export function listen(store) {
  const { state } = store;
  const form = $("form");
  const fields = form.elements;

  /** Follow the form. A mistake in it leaves the run alone. Returns whether the form is valid. */
  function submit() {
    if (state.phase === "loading") return true; // it is read when the model has arrived
    try {
      store.describe(readRequest(fields, state.info), readMoment());
      return true;
    } catch (error) {
      if (!error.field) throw error;
      $("settings").open = true;
      store.set({ refused: { message: error.message, name: error.field.name } });
      return false;
    }
  }

  function go(count = Infinity) {
    if (state.phase === "loading") return;
    if (!submit()) return fields[state.refused.name].focus();
    closeSettings();
    STEPS[state.step - 1].go?.(store, count);
  }

  function closeSettings() {
    if ($("settings").contains(document.activeElement)) $("settings").firstElementChild.focus();
    $("settings").open = false;
  }

  form.onsubmit = (event) => {
    event.preventDefault();
    if (state.phase === "running") store.pause();
    else go();
  };
  fields.prompt.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat) go();
  };
  for (const name of FIELDS) fields[name].oninput = submit;
  $("one").onclick = () => go(1);
  $("back").onclick = store.goBack;
  for (const name of ["layer", "head"]) $(name).onchange = ({ target }) => store.set({ [name]: Number(target.value) });

  /** Go to the step in the address, and to a moment in it. */
  function follow(moment) {
    const isNext = document.activeElement.matches(".go");
    store.turnToStep(readStep(), moment);
    // after the next drawing, because the focused button says something else now
    const heading = () => document.querySelector("section:not([hidden]) h1").focus({ preventScroll: true });
    if (isNext) requestAnimationFrame(heading);
    scrollTo(0, 0);
  }
  window.onpopstate = ({ state: held }) => {
    if (!held) return readStep() !== state.step && follow(); // a new step, or one that the reader left at once
    readForm(fields);
    submit();
    follow(readMoment());
  };
  window.onkeydown = ({ key }) => {
    if (key === "Escape") closeSettings();
  };

  // characters, each with its index: a cell of the strip, or one of the three
  for (const group of [$("cells"), $("three")]) {
    group.onkeydown = (event) => {
      const last = (state.answer ?? state.run).tokens.length - 1;
      const index = state.pointed ?? Number(event.target.dataset.index);
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (to === undefined || to < 0 || to > last) return;
      event.preventDefault();
      store.turnTo(to);
      store.point(to);
      const focus = () => group.querySelector(`[data-index="${to}"]`)?.focus();
      focus(); // at once, because Enter may follow
      requestAnimationFrame(focus); // or when it has been drawn
    };
    group.addEventListener("focusin", ({ target }) => {
      if (target.matches(":focus-visible")) store.point(Number(target.dataset.index));
    });
    group.addEventListener("focusout", () => store.point(null));
  }
  const places = [[$("strip"), (event) => indexAt(event, state.from)], [$("text"), characterAt]];
  for (const [place, indexOf] of places) {
    place.onpointermove = (event) => store.point(indexOf(event));
    place.onpointerleave = () => store.point(null);
    place.onclick = (event) => store.click(indexOf(event));
  }
  new ResizeObserver(() => store.set({ cells: measure() })).observe($("strip"));
  return { submit };
}
