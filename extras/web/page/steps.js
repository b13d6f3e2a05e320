// The five steps of the lesson. Their text is in index.html, and their pictures are in views/.
//
//   look             the layer and the head at the start, by default 0 and 0; "start": those of model.json
//   prepares         whether the step is about a text, which is then generated up to its middle
//   runs             whether the reader can run it
//   mixes            whether the stage draws each value as strongly as it is mixed
//   sweeps           whether each step of the run is animated
//   enter(store, m)  what happens at the start. m is the moment that a link points to: see address.js
//   click(store, i)  what a click on character i does
//   words(state)     what the step says about the answer on the stage
import { mistakeInWords } from "./mistakes.js";
import { changeInWords, takenInWords } from "./words.js";

const mark = (store, index) => store.mark(index);

export const STEPS = [
  {
    look: "start", prepares: true, runs: true, mixes: true,
    enter: (store, { take }) => take && store.takeOut(take - 1),
    click: (store, index) => (index === store.state.answer?.masked ? store.show(null) : store.takeOut(index)),
    words: takenInWords,
  },
  { look: "start", prepares: true, runs: true, sweeps: true, click: mark },
  {
    look: { layer: 1 }, prepares: true,
    enter: (store, { change, to }) => change && store.changeCharacter(change - 1, to),
    click: (store, index) => (store.state.answer ? store.changeCharacter(index) : store.mark(index)),
    words: changeInWords,
  },
  {
    prepares: true,
    enter: (store, { mistake }) => store.askMistakes(mistake),
    click: mark,
    words: mistakeInWords,
  },
  {},
];
